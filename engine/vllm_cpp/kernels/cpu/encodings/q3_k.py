"""Q3_K: 256 values a block: 32 bytes of third bits, 64 bytes of low 2 bits, 12 bytes of 6-bit scales, f16 d; a value is d * (scale - 32)
* (q - 4).

Each half of a block (128 values) has 32 low bytes: bits 2r and 2r + 1 of byte i belong to value i of its r-th run of 32. Bit r of third-
bit byte i belongs to value i of the block's r-th run. Scales: bytes 0..7 hold the low four bits of scales 0..7 and, above them, of 8..15;
bits 2r and 2r + 1 of bytes 8..11 the high two bits of scales 4r .. 4r + 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k, q8k_rows
from vllm_cpp.kernels.cpu.encodings.panel import four_lines
from vllm_cpp.kernels.simd import (
    convert,
    f32,
    f32x4,
    half_to_float,
    i8x64,
    i16x16,
    join,
    load,
    load_half,
    opaque,
    pack,
    reinterpret,
    shuffle,
    splat,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
    u16x32,
    u32,
    u32x16,
)
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 110


def quants(w: Value) -> Iterator[Value]:
    """Of a block, 64 at a time."""
    third = load(u8x32, w)
    third = reinterpret(u16x32, join(third, third))
    for half in range(2):
        packed = load(u8x32, w + (32 + 32 * half))
        packed = reinterpret(u16x32, join(packed, packed))
        for pair in range(2):
            low = reinterpret(u8x64, packed >> constant(u16x32, [4 * pair] * 16 + [4 * pair + 2] * 16)) & 3
            run = 4 * half + 2 * pair
            up, down = ([max(0, sign * (2 - r)) for r in (run, run + 1)] for sign in (1, -1))
            moved = third << constant(u16x32, [up[0]] * 16 + [up[1]] * 16) >> constant(u16x32, [down[0]] * 16 + [down[1]] * 16)
            yield low | (reinterpret(u8x64, moved) & 4)


def unpack(w: Value) -> tuple[Iterator[Value], Value, None, Value]:
    return quants(w), _scales(w + 96), None, splat(f32x4, load_half(f32, w + 108))


def _scales(packed: Value) -> Value:
    low = load(u8x8, packed)
    low = join(low & 15, low >> 4)
    high = load(u32, packed + 8)
    high = reinterpret(u8x16, pack([(high >> (2 * r)) & 0x03030303 for r in range(4)]))
    return convert(i16x16, low | (high << 4)) - 32


ORDER = tuple((2 * run, 2 * run + 1, 2 * run + 8, 2 * run + 9) for run in range(4))


def quants_as_they_lie(w: Value) -> Iterator[Value]:
    """The same run of both halves in a vector: ORDER."""
    packed, third = load(u8x64, w + 32), load(u8x32, w)
    third = reinterpret(u16x32, join(third, third)) >> constant(u16x32, [0] * 16 + [4] * 16)
    for run in range(4):
        moved = third << (2 - run) if run < 2 else third >> (run - 2)
        yield ((packed >> 2 * run) & 3) | (reinterpret(u8x64, moved) & 4)


def heads(blocks: Sequence[Value]) -> q8k_rows.Heads:
    ends = four_lines(load(u8x16, block + 94) for block in blocks)  # two last bytes of quants, 12 of scales, d
    lows, highs = (
        reinterpret(u32x16, shuffle(ends, [at + i for at in range(0, 64, 16) for i in picks]))
        for picks in ([*range(2, 10)] * 2, [*range(10, 14)] * 4)
    )
    lows, highs = lows >> constant(u32x16, [0, 0, 4, 4] * 4), highs >> constant(u32x16, [0, 2, 4, 6] * 4)
    scales = reinterpret(i8x64, (reinterpret(u8x64, lows) & 15) | (reinterpret(u8x64, highs & 0x03030303) << 4)) - 32
    d = half_to_float(shuffle(reinterpret(u16x32, ends), [7, 15, 23, 31]))
    order = q8k_rows.spread()
    return q8k_rows.Heads(
        [opaque(convert(i16x16, shuffle(scales, [at + i for i in order]))) for at in range(0, 64, 16)], None, d, None, q8k_rows.in_spread()
    )


WIDE = q8k_rows.Quants(quants_as_they_lie, ORDER)
FORM = q8k.Form(BLOCK_BYTES, unpack, largest=7, zero=4)
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
