"""IQ2_XS: 256 values a block: f16 d; 32 words of an index of 9 bits and, above it, 7 sign bits (an eighth makes the minuses even); 8 bytes
of 4-bit scales. A value is d / 8 * (2 * scale + 1) * its place of a point of 8.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import grids, q8k
from vllm_cpp.kernels.simd import convert, f32, f32x4, load, load_half, splat, u8x32, u16, u16x32, with_even_bits
from vllm_cpp.kernels.vectors import Value

BLOCK_BYTES = 74
BIAS = 64
POINTS = grids.signed_points("IQ2_XS", BIAS)


def unpack(w: Value) -> tuple[Iterator[Value], Value, None, Value]:
    words = load(u16x32, w + 2)
    signs = with_even_bits(convert(u8x32, words >> 9))
    numbers = (load(u16, w + (2 + 2 * i)) & 511 for i in range(32))
    return POINTS.look_up(words & 511, signs, numbers), grids.nibble_scales(w + 66), None, splat(f32x4, load_half(f32, w) * 0.125)


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
