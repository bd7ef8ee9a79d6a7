"""IQ3_S: 256 values a block: f16 d; 64 low bytes of indices; 8 bytes of their ninth bits; 32 sign bytes; 4 bytes of 4-bit scales. A value
is d * (2 * scale + 1) * its place of a point of 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import grids, q8k
from vllm_cpp.kernels.simd import (
    bit_masks,
    convert,
    f32,
    f32x4,
    load,
    load_half,
    select,
    shuffle,
    splat,
    u8x4,
    u8x32,
    u8x64,
    u16x4,
    u16x16,
    u16x64,
)
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 110
BIAS = 16
POINTS = grids.signed_points("IQ3_S", BIAS)


def unpack(w: Value) -> tuple[Iterator[Value], Value, None, Value]:
    (mask,) = bit_masks(load(u16x4, w + 66), [range(4)])
    ninth = select(mask, constant(u16x64, 256), constant(u16x64, 0))
    scales = convert(u16x16, shuffle(load(u8x4, w + 106), [i // 4 for i in range(16)]))
    scales = grids.odd((scales >> constant(u16x16, [0, 0, 4, 4] * 4)) & 15)
    quants = POINTS.look_up(convert(u16x64, load(u8x64, w + 2)) | ninth, load(u8x32, w + 74))
    return quants, scales, None, splat(f32x4, load_half(f32, w))


FORM = q8k.Form(BLOCK_BYTES, unpack, largest=BIAS + 15, sub=32, zero=BIAS)
look, multiply = grids.steps(FORM)
stage, values = q8k.stage(FORM), q8k.values(FORM)
pieces = q8k.Tile(FORM)
none, begin, add, end, total = pieces.none, pieces.begin, pieces.add, pieces.end, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    grids.rows(look, multiply, BLOCK_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    q8k.tile(stage, none, begin, add, end, total, 32, BLOCK_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    q8k.decode(values, BLOCK_BYTES, w, k, out)
