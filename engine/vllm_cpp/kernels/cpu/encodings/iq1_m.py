"""IQ1_M: 256 values a block: 32 low bytes of indices; 16 bytes of nibbles, one an index: its three high bits and whether its values are
moved down; four words, each of four scales of three bits and a quarter of the f16 d. A value is d * (2 * scale + 1) * (its place of a
point of 8, and 1/8 more or less).
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import grids, q8k
from vllm_cpp.kernels.simd import (
    convert,
    f32x4,
    half_to_float,
    load,
    reinterpret,
    select,
    shuffle,
    splat,
    u8x16,
    u8x32,
    u16,
    u16x4,
    u16x16,
    u16x32,
    u64,
)
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 56
BIAS = 16
POINTS = grids.moved_points("IQ1_M", BIAS)


def unpack(w: Value) -> tuple[Iterator[Value], Value, None, Value]:
    twice = reinterpret(u16x32, shuffle(load(u8x16, w + 32), [i // 4 for i in range(64)]))
    nibbles = twice >> constant(u16x32, [0, 4] * 16)
    index = convert(u16x32, load(u8x32, w)) | ((nibbles & 7) << 8)
    down = select((nibbles & 8) != 0, constant(u8x32, 255), constant(u8x32, 0))
    scales = shuffle(load(u16x4, w + 48), [i // 4 for i in range(16)]) >> constant(u16x16, [0, 3, 6, 9] * 4)
    return POINTS.look_up(index, down), grids.odd(scales & 7), None, splat(f32x4, _d(load(u64, w + 48)) * 0.125)


def _d(words: Value) -> Value:
    """The f16 whose quarters are the words' highest four bits, the lowest first."""
    bits = (words >> 12) & 15
    for i in range(1, 4):
        bits = bits | ((words >> (12 + 12 * i)) & (15 << 4 * i))
    return half_to_float(convert(u16, bits))


FORM = q8k.Form(BLOCK_BYTES, unpack, largest=BIAS + 9, sub=16, zero=BIAS)
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
