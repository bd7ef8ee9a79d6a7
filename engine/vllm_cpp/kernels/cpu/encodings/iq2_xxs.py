"""IQ2_XXS: 256 values a block: f16 d; for every 32 values four index bytes, then a word of four signs and a scale (see `grids.py`). A
value is d / 8 * (2 * scale + 1) * its place of a point of 8.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import grids, q8k
from vllm_cpp.kernels.simd import f32, f32x4, load, load_half, reinterpret, shuffle, splat, u8, u8x32, u32x16
from vllm_cpp.kernels.vectors import Value

BLOCK_BYTES = 66
BIAS = 64
POINTS = grids.signed_points("IQ2_XXS", BIAS)


def unpack(w: Value) -> tuple[Iterator[Value], Value, None, Value]:
    words = load(u32x16, w + 2)
    signs, scales = grids.signs_and_scales(shuffle(words, range(1, 16, 2)))
    index = reinterpret(u8x32, shuffle(words, range(0, 16, 2)))
    numbers = (load(u8, w + (2 + 8 * run + i)) for run in range(8) for i in range(4))
    return POINTS.look_up(index, signs, numbers), scales, None, splat(f32x4, load_half(f32, w) * 0.125)


FORM = q8k.Form(BLOCK_BYTES, unpack, largest=BIAS + 43, sub=32, zero=BIAS)
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
