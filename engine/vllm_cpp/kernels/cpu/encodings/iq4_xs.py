"""IQ4_XS: 256 values a block: f16 d, 8 x 2 high scale bits, 8 x 4 low scale bits, 8 x 16 bytes of 4 bits; a value is d * (scale - 32) *
LEVELS[q].

The low halves of a run's 16 bytes are its first 16 values, the high halves the other 16.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k
from vllm_cpp.kernels.cpu.encodings.iq4_nl import LEVELS
from vllm_cpp.kernels.simd import (
    convert,
    f32,
    f32x4,
    i8x16,
    i16x16,
    load,
    load_half,
    reinterpret,
    shuffle,
    splat,
    table16,
    u8x32,
    u8x64,
    u16,
    u16x32,
    u32,
    u32x16,
)
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 136


def unpack(w: Value) -> tuple[list[Value], Value, None, Value]:
    levels = constant(i8x16, LEVELS)
    quants = []
    for j in range(4):
        packed = load(u8x32, w + (8 + 32 * j))
        twice = reinterpret(u16x32, shuffle(packed, [*range(16), *range(16), *range(16, 32), *range(16, 32)]))
        quants.append(table16(levels, reinterpret(u8x64, twice >> constant(u16x32, ([0] * 8 + [4] * 8) * 2)) & 15))
    return quants, _scales(w), None, splat(f32x4, load_half(f32, w))


def _scales(w: Value) -> Value:
    run = [i // 2 for i in range(16)]
    low = splat(u32x16, load(u32, w + 4)) >> constant(u32x16, [4 * r for r in run])
    high = splat(u32x16, convert(u32, load(u16, w + 2))) >> constant(u32x16, [2 * r for r in run])
    return convert(i16x16, (low & 15) | ((high & 3) << 4)) - 32


FORM = q8k.Form(BLOCK_BYTES, unpack, largest=127, sub=32, zero=0, signed=True)
dot, finish, stage, values = q8k.dot(FORM), q8k.finish(FORM), q8k.stage(FORM), q8k.values(FORM)
pieces = q8k.Tile(FORM)
none, begin, add, end, total = pieces.none, pieces.begin, pieces.add, pieces.end, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    q8k.rows(dot, finish, BLOCK_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    q8k.tile(stage, none, begin, add, end, total, 32, BLOCK_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    q8k.decode(values, BLOCK_BYTES, w, k, out)
