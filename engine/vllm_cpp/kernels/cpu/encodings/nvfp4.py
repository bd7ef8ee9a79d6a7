"""NVFP4: 64 values a block: 4 scale bytes, one for every 16 values, then 4 x 8 bytes of 4 bits; a value is scale * LEVELS[q] / 2.

A scale is an unsigned float of 4 bits of exponent and 3 of mantissa (UE4M3; 127 is its NaN and counts as 0, the top bit means nothing).
The low halves of a run's 8 bytes are its first 8 values, the high halves the other 8. Having two scales for every 32 values, this form
keeps two sums a block: of its first and of its second half, where forms with minimums keep those of values and minimums.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import a32, a32_rows, wide
from vllm_cpp.kernels.cpu.encodings.a32 import QUAD, SCALES, SECOND
from vllm_cpp.kernels.cpu.encodings.a32_rows import for_each_row, scales_of
from vllm_cpp.kernels.cpu.encodings.mxfp4 import OFFSET, levels
from vllm_cpp.kernels.cpu.encodings.panel import GROUP, ROWS, WORD_BYTES, ask_ahead, side_by_side
from vllm_cpp.kernels.simd import (
    convert,
    dots,
    f32,
    f32x4,
    f32x16,
    fma,
    half_to_float,
    i8x64,
    i32,
    i32x16,
    join,
    load,
    pack,
    reinterpret,
    select,
    shuffle,
    splat,
    u8x32,
    u8x64,
    u16,
    u64x8,
    unrolled,
    zero,
)
from vllm_cpp.kernels.vectors import Value, constant

BLOCK, BLOCK_BYTES = 64, 36
QUAD_BYTES = 2 * BLOCK_BYTES
LARGEST = 2 * OFFSET


def quants_of_two(w: Value, other: Value) -> tuple[Value, Value]:
    """Two blocks as a quad."""
    packed = join(load(u8x32, w + 4), load(u8x32, other + 4))
    low, high = (reinterpret(u64x8, levels(index)) for index in (packed & 15, packed >> 4))
    first, second = (shuffle(low, [i + half + 8 * side for i in range(0, 8, 2) for side in range(2)], high) for half in range(2))
    return reinterpret(u8x64, first), reinterpret(u8x64, second)


def quants(w: Value) -> tuple[Value, Value]:
    return quants_of_two(w, w + BLOCK_BYTES)


def scales(addresses: Sequence[Value]) -> tuple[Value, Value]:
    """Of the first and of the second halves of 32 values, whose codes are side by side."""
    both = pack([load(u16, address) for address in addresses])
    codes = [both & 255, both >> 8]
    # as an f16 the code means 2 ** -8 times what it should, and the levels are doubled
    return tuple(half_to_float(select(code == 127, constant(both.type, 0), code & 127) << 7) * 128.0 for code in codes)


def unpack_one(w: Value) -> tuple[Value, Value, Value]:
    return *quants_of_two(w, w), join(*scales([w + at for at in (0, 2, 0, 2)]))


@unrolled
def dot(total: Value, second_total: Value, w0: Value, w1: Value, w2: Value, w3: Value, reached: Value, act: Value) -> tuple[Value, Value]:
    """`a32_rows.dot` with a sum for each half."""
    rows = (w0, w1, w2, w3)
    ask_ahead(reached, len(rows) * QUAD_BYTES)
    unpacked = [quants(w) for w in rows]
    d = for_each_row(load(f32x4, act + SCALES))
    totals = []
    for half, (sums, scale) in enumerate(zip((total, second_total), scales_of(FORM, rows), strict=True)):
        values = load(i8x64, act + SECOND * half)
        offset = dots(zero(i32x16), [(constant(u8x64, OFFSET), values)], LARGEST)
        whole = side_by_side([dots(zero(i32x16), [(row[half], values)], LARGEST) - offset for row in unpacked])
        totals.append(fma(convert(f32x16, whole), scale * d, sums))
    return tuple(totals)


class Tile(a32.Tile):
    """`a32.Tile` with a sum for each half."""

    def _block(self, sums: tuple[Value, ...], columns: Value, place: Value, *acts: Value) -> tuple[Value, ...]:
        sums = list(sums)
        for half in range(2):
            words = [columns + (place * 4 + 16 * half + word) * WORD_BYTES for word in range(4)]
            same = [[splat(i32x16, load(i32, act + place * 16 + (SECOND * half + 4 * word))) for word in range(4)] for act in acts]
            same = [[reinterpret(i8x64, word) for word in words] for words in same]
            weights = [[load(u8x64, word + 64 * g) for word in words] for g in range(ROWS // GROUP)]
            offsets = [dots(zero(i32x16), [(constant(u8x64, OFFSET), word) for word in words], LARGEST) for words in same]
            scales = [load(f32x16, columns + (32 + QUAD * half + place) * WORD_BYTES + 64 * g) for g in range(ROWS // GROUP)]
            for i, (a, g) in enumerate(self.cells):
                whole = dots(zero(i32x16), list(zip(weights[g], same[a], strict=True)), LARGEST) - offsets[a]
                j = i + half * len(self.cells)
                sums[j] = fma(convert(f32x16, whole), scales[g] * load(f32, acts[a] + SCALES + place * 4), sums[j])
        return tuple(sums)


FORM = a32.Form(QUAD_BYTES, quants, scales, [0, 2, BLOCK_BYTES, BLOCK_BYTES + 2], largest=LARGEST, offset=OFFSET, minimum=True)
stage, values = a32.stage(FORM), wide.values(unpack_one, BLOCK, OFFSET)
pieces = Tile(FORM)
none, block, keep, total = pieces.none, pieces.block, pieces.keep, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    a32_rows.rows(dot, True, QUAD_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    a32.tile(stage, none, block, keep, total, QUAD_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    wide.decode(values, BLOCK, BLOCK_BYTES, w, k, out)
