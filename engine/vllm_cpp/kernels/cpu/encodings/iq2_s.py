"""IQ2_S: 256 values a block: f16 d; 32 low bytes of indices; 32 sign bytes; 8 bytes, each with the two high bits of four indices; 8 bytes
of 4-bit scales. A value is d / 8 * (2 * scale + 1) * its place of a point of 8.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import grids, q8k
from vllm_cpp.kernels.simd import convert, f32, f32x4, load, load_half, reinterpret, shuffle, splat, u8x8, u8x32, u16x32
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 82
BIAS = 64
POINTS = grids.signed_points("IQ2_S", BIAS)


def unpack(w: Value) -> tuple[Iterator[Value], Value, None, Value]:
    high = reinterpret(u16x32, shuffle(load(u8x8, w + 66), [i // 8 for i in range(64)]))
    index = convert(u16x32, load(u8x32, w + 2)) | ((high << constant(u16x32, [8, 6, 4, 2] * 8)) & 0x300)
    return POINTS.look_up(index, load(u8x32, w + 34)), grids.nibble_scales(w + 74), None, splat(f32x4, load_half(f32, w) * 0.125)


FORM = q8k.Form(BLOCK_BYTES, unpack, largest=BIAS + 43, sub=16, zero=BIAS)
look, multiply = grids.steps(FORM)
stage, values = q8k.stage(FORM), q8k.values(FORM)
pieces = q8k.Tile(FORM)
none, begin, add, end, total = pieces.none, pieces.begin, pieces.add, pieces.end, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    grids.rows(look, multiply, BLOCK_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    q8k.tile(stage, none, begin, add, end, total, 16, BLOCK_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    q8k.decode(values, BLOCK_BYTES, w, k, out)
