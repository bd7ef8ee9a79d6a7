"""What the grid encodings share: 8 or 4 values that one index stands for, with signs beside it.

Owns the grids (gguf's), how values are held (BIAS + value: an unsigned byte, with a minus or without), the words of signs and scales that
two encodings have alike, and the row kernel. Must not know where an encoding keeps its indices, signs and scales.

The row kernel computes what `q8k.rows` does, one block later: looking points up takes so long that the CPU cannot look far enough ahead
for the next block, so the next block's points are looked up before this one's products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from gguf import quants as gguf_quants

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k
from vllm_cpp.kernels.cpu.encodings.panel import AHEAD
from vllm_cpp.kernels.simd import (
    bytes_at,
    convert,
    dot_i16,
    f32,
    f32x4,
    fma,
    high,
    i8x64,
    i16x16,
    i32x8,
    i32x16,
    load,
    low,
    opaque,
    pair_sums,
    prefetch,
    reinterpret,
    shuffle,
    store,
    u8x8,
    u16x16,
    u64x4,
    unrolled,
    with_even_bits,
    zero,
)
from vllm_cpp.kernels.tables import Points
from vllm_cpp.kernels.vectors import Value, constant, features


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


def steps(form: q8k.Form) -> tuple[Callable, Callable]:
    """What `rows` does with every block: look(address), one block ahead, and multiply(total, what look gave, an activation block).

    With the registers for it, look unpacks the block. With 16 only it does nothing, and each 64 values are multiplied as they come.
    """

    def unpacked(w: Value) -> tuple[Value, ...]:
        for line in range(0, form.block_bytes, 64):
            prefetch(w + (AHEAD + line))
        quants, scales, minimums, d = form.unpacked(w)
        return *quants, by_half(scales), minimums, d

    def multiply(total: Value, block: tuple[Value, ...], quants: Value, sums: Value, d: Value) -> Value:
        *unpacked, scales, minimums, weight_d = block
        return add_product(total, unpacked, scales, minimums, weight_d * load(f32, d), quants, sums)

    def unpack_and_multiply(total: Value, w: Value, quants: Value, sums: Value, d: Value) -> Value:
        for line in range(0, form.block_bytes, 64):
            prefetch(w + (AHEAD + line))
        unpacked, scales, minimums, weight_d = form.unpacked(w)
        return add_product(total, unpacked, by_half(scales), minimums, weight_d * load(f32, d), quants, sums)

    if "avx512f" in features():
        return unrolled(unpacked), unrolled(multiply)
    return unrolled(lambda w: w), unrolled(unpack_and_multiply)


def by_half(scales: Value) -> Value:
    """The scales of the first halves of all runs of 32 values, then those of the second: each where a register's half needs it."""
    return opaque(shuffle(scales, [*range(0, 16, 2), *range(1, 16, 2)]))


def add_product(total: Value, unpacked: Iterable[Value], scales: Value, minimums: Value, d: Value, quants: Value, sums: Value) -> Value:
    """`q8k.dot` of an unpacked block with unsigned quants, its sums in a tree."""
    parts = []
    for j, q in enumerate(unpacked):
        by_pair = shuffle(scales, [8 * half + run for run in (2 * j, 2 * j + 1) for half in range(2) for _ in range(8)])
        parts.append(dot_i16(zero(i32x16), pair_sums(q, load(i8x64, quants + 64 * j)), by_pair))
    whole = (parts[0] + parts[1]) + (parts[2] + parts[3])
    whole = low(whole) + (high(whole) - dot_i16(zero(i32x8), minimums, load(i16x16, sums)))
    whole = low(whole) + high(whole)
    for swap in (2, 1):
        whole = whole + shuffle(whole, [lane ^ swap for lane in range(4)])
    return fma(convert(f32x4, whole), d, total)


@jit.inner
def rows(look, multiply, block_bytes, w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    """The row kernel of every grid encoding (see `jit.row_kernel`)."""
    blocks = k // q8k.BLOCK
    if n_rows > 0:
        block = look(w)
    for r in range(n_rows):
        row = w + r * stride
        total = zero(f32x4)
        for b in range(blocks):
            # after a row's last block the next row's first; after the last row's, one that is not used
            after = row + block_bytes * (b + 1) if b + 1 < blocks else w + min(r + 1, n_rows - 1) * stride
            next_block = look(after)
            at = q8k.BLOCK * b
            total = multiply(total, block, act + at, act + q8k.sums_at(k) + 32 * b, act + q8k.scales_at(k) + 4 * b)
            block = next_block
        store(out + 4 * r, total[0])
