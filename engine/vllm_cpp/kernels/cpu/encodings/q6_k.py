"""Q6_K: 256 values a block: 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 x i8 scales, f16 d; a value is d * scale * (q - 32).

Each half of a block (128 values) has 64 low bytes, whose low halves are its first 64 values, and 32 high bytes with two bits of each run
of 32 values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k, q8k_rows
from vllm_cpp.kernels.simd import (
    convert,
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
    u8x32,
    u8x64,
    u16,
    u16x32,
)
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 210


def quants(w: Value) -> Iterator[Value]:
    """Of a block, 64 at a time."""
    for half in range(2):
        low = load(u8x64, w + 64 * half)
        high = load(u8x32, w + (128 + 32 * half))
        high = reinterpret(u16x32, join(high, high))
        yield (low & 15) | (reinterpret(u8x64, high << constant(u16x32, [4] * 16 + [2] * 16)) & 48)
        yield (low >> 4) | (reinterpret(u8x64, high >> constant(u16x32, [0] * 16 + [2] * 16)) & 48)


def unpack(w: Value) -> tuple[Iterator[Value], Value, None, Value]:
    return quants(w), convert(i16x16, load(i8x16, w + 192)), None, splat(f32x4, load_half(f32, w + 208))


def heads(blocks: Sequence[Value]) -> q8k_rows.Heads:
    d = half_to_float(pack([load(u16, block + 208) for block in blocks]))
    scales = [shuffle(load(i8x16, block + 192), q8k_rows.spread()) for block in blocks]
    return q8k_rows.Heads([opaque(convert(i16x16, row)) for row in scales], None, d, None, q8k_rows.in_spread())


def quants_by_byte(w: Value) -> Iterator[Value]:
    """Both halves of 32 bytes at a time: all that is loaded is used at once."""
    for half in range(2):
        high = load(u8x32, w + (128 + 32 * half))
        high = reinterpret(u16x32, join(high, high))
        for run in range(2):
            low = load(u8x32, w + (64 * half + 32 * run))
            low = reinterpret(u8x64, reinterpret(u16x32, join(low, low)) >> constant(u16x32, [0] * 16 + [4] * 16)) & 15
            up, down = [4 - 2 * run] * 16 + [0] * 16, [0] * 16 + [2 * run] * 16
            yield low | (reinterpret(u8x64, high << constant(u16x32, up) >> constant(u16x32, down)) & 48)


NARROW = q8k_rows.Quants(quants_by_byte, ((0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15)))
FORM = q8k.Form(BLOCK_BYTES, unpack, largest=63, zero=32)
dots, stage, values = q8k_rows.four_dots(FORM, heads, q8k_rows.Quants(quants), NARROW), q8k.stage(FORM), q8k.values(FORM)
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
