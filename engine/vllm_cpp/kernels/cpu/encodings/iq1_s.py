"""IQ1_S: 256 values a block: f16 d; 32 low bytes of indices; for every 32 values a word: four times three high bits of an index, a scale of
three bits, and whether its values are moved down. A value is d * (2 * scale + 1) * (its place of a point of 8, and 1/8 more or less).
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import grids, q8k
from vllm_cpp.kernels.simd import convert, f32, f32x4, load, load_half, shuffle, splat, u8x32, u16x8, u16x32
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 50
BIAS = 16
POINTS = grids.moved_points("IQ1_S", BIAS)


def unpack(w: Value) -> tuple[Iterator[Value], Value, None, Value]:
    words = load(u16x8, w + 34)
    four = shuffle(words, [i // 4 for i in range(32)])
    index = convert(u16x32, load(u8x32, w + 2)) | (((four >> constant(u16x32, [0, 3, 6, 9] * 8)) & 7) << 8)
    down = convert(u8x32, four >> 15) * 255
    scales = grids.odd(shuffle((words >> 12) & 7, [i // 2 for i in range(16)]))
    return POINTS.look_up(index, down), scales, None, splat(f32x4, load_half(f32, w) * 0.125)


FORM = q8k.Form(BLOCK_BYTES, unpack, largest=BIAS + 9, sub=32, zero=BIAS)
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
