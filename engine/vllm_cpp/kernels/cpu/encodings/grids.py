"""What the grid encodings share: 8 or 4 values that one index stands for, with signs beside it.

Owns the grids (gguf's), how values are held (BIAS + value: an unsigned byte, with a minus or without) and the words of signs and scales
that two encodings have alike. Must not know where an encoding keeps its indices, signs and scales.
"""

from __future__ import annotations

import numpy as np
from gguf import quants as gguf_quants

from vllm_cpp.kernels.simd import bytes_at, convert, i16x16, load, reinterpret, shuffle, u8x8, u16x16, u64x4, with_even_bits
from vllm_cpp.kernels.tables import Points
from vllm_cpp.kernels.vectors import Value, constant


def points(name: str) -> np.ndarray:
    """[number of points, values] of the encoding with gguf's class of that name."""
    of = getattr(gguf_quants, name)
    of.init_grid()
    return of.grid[0, 0].astype(int)


def signed_points(name: str, bias: int) -> Points:
    """Whose values are negative where their bit is set."""
    return Points(bias + points(name), lambda held: 2 * bias - held)


def signs_and_scales(words: Value) -> tuple[Value, Value]:
    """u32x8, one for every 32 values: 4 x 7 sign bits, each seven with an eighth that makes the minuses even, and a scale of four bits ->
    the signs, u8x32; the scales, i16x16."""
    seven = bytes_at(reinterpret(u64x4, words), [start + shift for start in (0, 32) for shift in (0, 7, 14, 21)])
    return with_even_bits(seven), odd(shuffle(words >> 28, [i // 2 for i in range(16)]))


def nibble_scales(address: Value) -> Value:
    """i16x16: eight bytes of two scales each, the first lower."""
    twice = convert(u16x16, shuffle(load(u8x8, address), [i // 2 for i in range(16)]))
    return odd((twice >> constant(u16x16, [0, 4] * 8)) & 15)


def odd(codes: Value) -> Value:
    """The odd number a scale's code stands for."""
    return convert(i16x16, codes) * 2 + 1


def moved_points(name: str, bias: int) -> Points:
    """In eighths: 8 times a point's value and 1 more, or 1 less where its bit is set."""
    return Points(bias + 8 * points(name) + 1, lambda held: held - 2)
