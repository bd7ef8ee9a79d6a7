"""Q2_K: 256 values a block: 16 bytes of 4-bit scales and, above them, 4-bit minimums; 64 bytes of 2 bits; f16 d, f16 dmin.

Each half of a block (128 values) has 32 bytes: bits 2r and 2r + 1 of byte i belong to value i of its r-th run of 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k, q8k_rows
from vllm_cpp.kernels.cpu.encodings.panel import four_lines
from vllm_cpp.kernels.cpu.encodings.scales6 import d_and_dmin
from vllm_cpp.kernels.simd import (
    convert,
    half_to_float,
    high,
    i16x16,
    join,
    load,
    low,
    opaque,
    pack,
    reinterpret,
    shuffle,
    u8x16,
    u8x32,
    u8x64,
    u16x8,
    u16x32,
    u32,
    u32x4,
    wide_registers,
)
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 84


def quants(w: Value) -> Iterator[Value]:
    """Of a block, 64 at a time."""
    for half in range(2):
        packed = load(u8x32, w + (16 + 32 * half))
        packed = reinterpret(u16x32, join(packed, packed))
        for run in (0, 4):
            yield reinterpret(u8x64, packed >> constant(u16x32, [run] * 16 + [run + 2] * 16)) & 3


def unpack(w: Value) -> tuple[Iterator[Value], Value, Value, Value]:
    both = load(u8x16, w)
    return quants(w), convert(i16x16, both & 15), convert(i16x16, both >> 4), d_and_dmin(w + 80)


ORDER = tuple((2 * run, 2 * run + 1, 2 * run + 8, 2 * run + 9) for run in range(4))


def quants_as_they_lie(w: Value) -> Iterator[Value]:
    """The same run of both halves in a vector: ORDER."""
    packed = load(u8x64, w + 16)
    for run in range(4):
        yield (packed >> 2 * run) & 3


def heads(blocks: Sequence[Value]) -> q8k_rows.Heads:
    d = reinterpret(u16x8, pack([load(u32, block + 80) for block in blocks]))
    d = half_to_float(shuffle(d, [0, 2, 4, 6, 1, 3, 5, 7]))
    scales, minimums = _by_row(blocks) if wide_registers() else _by_word(blocks)
    return q8k_rows.Heads(scales, minimums, low(d), high(d))


def _by_word(blocks: Sequence[Value]) -> tuple[q8k_rows.ByteColumns, q8k_rows.ByteColumns]:
    words = q8k_rows.ByteColumns.transposed([load(u32x4, block) for block in blocks])
    return tuple(q8k_rows.ByteColumns([(word >> shift) & 0x0F0F0F0F for word in words]) for shift in (0, 4))


def _by_row(blocks: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    both = four_lines(load(u8x16, block) for block in blocks)
    scales, minimums = ([convert(i16x16, shuffle(x, range(at, at + 16))) for at in range(0, 64, 16)] for x in (both & 15, both >> 4))
    return [opaque(row) for row in scales], minimums


WIDE = q8k_rows.Quants(quants_as_they_lie, ORDER)
FORM = q8k.Form(BLOCK_BYTES, unpack, largest=3)
dots, stage, values = q8k_rows.four_dots(FORM, heads, WIDE, q8k_rows.Quants(quants)), q8k.stage(FORM), q8k.values(FORM)
folded = FORM.folded
pieces = q8k.Tile(FORM)
none, begin, add, end, total = pieces.none, pieces.begin, pieces.add, pieces.end, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    q8k_rows.rows(dots, folded, BLOCK_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    q8k.tile(stage, none, begin, add, end, total, 16, BLOCK_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    q8k.decode(values, BLOCK_BYTES, w, k, out)
