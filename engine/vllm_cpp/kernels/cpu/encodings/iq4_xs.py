"""IQ4_XS: 256 values a block: f16 d, 8 x 2 high scale bits, 8 x 4 low scale bits, 8 x 16 bytes of 4 bits; a value is d * (scale - 32) *
LEVELS[q].

The low halves of a run's 16 bytes are its first 16 values, the high halves the other 16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k, q8k_rows
from vllm_cpp.kernels.cpu.encodings.iq4_nl import LEVELS
from vllm_cpp.kernels.simd import (
    f32,
    f32x4,
    half_to_float,
    i8x16,
    i16x16,
    join,
    load,
    load_half,
    opaque,
    pack,
    reinterpret,
    shuffle,
    splat,
    table16,
    u8x32,
    u8x64,
    u16,
    u16x16,
    u16x32,
    u64,
    u64x4,
)
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 136


def quants(w: Value) -> Iterator[Value]:
    """Of a block, 64 at a time."""
    levels = constant(i8x16, LEVELS)
    for j in range(4):
        packed = load(u8x32, w + (8 + 32 * j))
        twice = reinterpret(u16x32, shuffle(packed, [*range(16), *range(16), *range(16, 32), *range(16, 32)]))
        yield table16(levels, reinterpret(u8x64, twice >> constant(u16x32, ([0] * 8 + [4] * 8) * 2)) & 15)


def unpack(w: Value) -> tuple[Iterator[Value], Value, None, Value]:
    in_order = shuffle(_scales(w), [i // 2 for i in range(16)])
    return quants(w), in_order, None, splat(f32x4, load_half(f32, w))


def _scales(w: Value) -> Value:
    """The eight scales, twice."""
    words = reinterpret(u16x16, splat(u64x4, load(u64, w)))  # d, high bits, and two words of low ones
    low = shuffle(words, [2 + run // 4 for run in range(8)] * 2) * constant(u16x16, [1 << (12 - 4 * (run % 4)) for run in range(8)] * 2)
    high = shuffle(words, [1] * 16) * constant(u16x16, [1 << (14 - 2 * run) for run in range(8)] * 2)
    return reinterpret(i16x16, (low >> 12) | (high >> 10) & 0x30) - 32


def nibbles(w: Value) -> Iterator[Value]:
    """Quants as they lie: the first halves of two runs, then their second halves: ORDER."""
    levels = constant(i8x16, LEVELS)
    for at in range(8, BLOCK_BYTES, 32):
        packed = load(u8x32, w + at)
        twice = reinterpret(u16x32, join(packed, packed)) >> constant(u16x32, [0] * 16 + [4] * 16)
        yield table16(levels, reinterpret(u8x64, twice) & 15)


def heads(blocks: Sequence[Value]) -> q8k_rows.Heads:
    d = half_to_float(pack([load(u16, block) for block in blocks]))
    return q8k_rows.Heads([opaque(_scales(block)) for block in blocks], None, d, None, SCALE_OF)


ORDER = tuple((4 * j, 4 * j + 2, 4 * j + 1, 4 * j + 3) for j in range(4))
SCALE_OF = [run + 8 * half for run in range(8) for half in (run % 2,) * 2]
FORM = q8k.Form(BLOCK_BYTES, unpack, largest=127, sub=32, zero=0, signed=True)
dots = q8k_rows.four_dots(FORM, heads, q8k_rows.Quants(quants), q8k_rows.Quants(nibbles, ORDER))
stage, values = q8k.stage(FORM), q8k.values(FORM)
folded = FORM.folded
pieces = q8k.Tile(FORM)
none, begin, add, end, total = pieces.none, pieces.begin, pieces.add, pieces.end, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    q8k_rows.rows(dots, folded, BLOCK_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    q8k.tile(stage, none, begin, add, end, total, 32, BLOCK_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    q8k.decode(values, BLOCK_BYTES, w, k, out)
