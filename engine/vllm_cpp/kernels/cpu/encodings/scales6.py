"""The packed scales of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minimums in 12 bytes.

Owns that one layout, of one block and of four at once: bytes 0..3 hold scales 0..3 in their low six bits, bytes 4..7 minimums 0..3;
bytes 8..11 hold the low four bits of scales 4..7 and, above them, of minimums 4..7, whose high two bits stand on top of bytes 0..3 and
4..7.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_cpp.kernels.cpu.encodings import q8k_rows
from vllm_cpp.kernels.cpu.encodings.panel import four_lines
from vllm_cpp.kernels.simd import (
    convert,
    half_to_float,
    high,
    i16x16,
    load,
    low,
    opaque,
    pack,
    reinterpret,
    shuffle,
    splat,
    u8x16,
    u8x64,
    u16x8,
    u32,
    u32x4,
    u32x16,
    wide_registers,
)
from vllm_cpp.kernels.vectors import Value, constant

RUN_OF = [group // 2 for group in range(16)]


def scales_and_minimums(packed: Value) -> tuple[Value, Value]:
    """Each of the eight scales and minimums twice in a row, as i16x16: one for every 16 values."""
    first, second, third = (load(u32, packed + at) for at in (0, 4, 8))
    scales_high = (third & 0x0F0F0F0F) | ((first >> 6) & 0x03030303) << 4
    minimums_high = ((third >> 4) & 0x0F0F0F0F) | ((second >> 6) & 0x03030303) << 4
    both = reinterpret(u8x16, pack([first & 0x3F3F3F3F, scales_high, second & 0x3F3F3F3F, minimums_high]))
    return tuple(convert(i16x16, shuffle(both, [start + i // 2 for i in range(16)])) for start in (0, 8))


def d_and_dmin(address: Value) -> Value:
    """Two f16 in turn, as f32x4."""
    return half_to_float(low(reinterpret(u16x8, splat(u32x4, load(u32, address)))))


def heads(blocks: Sequence[Value]) -> q8k_rows.Heads:
    """All that stands before the quants of four blocks: a word of d and dmin, then the 12 bytes."""
    return _by_row(blocks) if wide_registers() else _by_word(blocks)


def _by_word(blocks: Sequence[Value]) -> q8k_rows.Heads:
    d, first, second, third = q8k_rows.ByteColumns.transposed([load(u32x4, block) for block in blocks])
    scales = [first & 0x3F3F3F3F, (third & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)]
    minimums = [second & 0x3F3F3F3F, ((third >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030)]
    d = half_to_float(shuffle(reinterpret(u16x8, d), [0, 2, 4, 6, 1, 3, 5, 7]))
    return q8k_rows.Heads(q8k_rows.ByteColumns(scales), q8k_rows.ByteColumns(minimums), low(d), high(d), RUN_OF, RUN_OF)


def _by_row(blocks: Sequence[Value]) -> q8k_rows.Heads:
    words = four_lines(load(u32x4, block) for block in blocks)
    lows = shuffle(words, [at + word for at in range(0, 16, 4) for word in (1, 3, 2, 3)]) >> constant(u32x16, [0, 0, 0, 4] * 4)
    lows = lows & constant(u32x16, [0x3F3F3F3F, 0x0F0F0F0F] * 8)
    highs = shuffle(words, [at + word for at in range(0, 16, 4) for word in (0, 1, 0, 2)]) >> 2
    both = reinterpret(u8x64, lows | (highs & constant(u32x16, [0, 0x30303030] * 8)))
    rows = [opaque(convert(i16x16, shuffle(both, range(at, at + 16)))) for at in range(0, 64, 16)]
    d = reinterpret(u16x8, shuffle(words, range(0, 16, 4)))
    d = half_to_float(shuffle(d, [0, 2, 4, 6, 1, 3, 5, 7]))
    return q8k_rows.Heads(rows, rows, low(d), high(d), RUN_OF, [8 + run for run in RUN_OF])
