"""Q6_K: 256 values a block: 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 x i8 scales, f16 d; a value is d * scale * (q - 32).

Each half of a block (128 values) has 64 low bytes, whose low halves are its first 64 values, and 32 high bytes with two bits of each run
of 32 values.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k
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
    splat,
    u8x32,
    u8x64,
    u16,
    u16x32,
)
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 210


def unpack(w: Value) -> tuple[list[Value], Value, None, Value]:
    quants = []
    for half in range(2):
        low = load(u8x64, w + 64 * half)
        high = load(u8x32, w + (128 + 32 * half))
        high = reinterpret(u16x32, join(high, high))
        quants.append((low & 15) | (reinterpret(u8x64, high << constant(u16x32, [4] * 16 + [2] * 16)) & 48))
        quants.append((low >> 4) | (reinterpret(u8x64, high >> constant(u16x32, [0] * 16 + [2] * 16)) & 48))
    return quants, convert(i16x16, load(i8x16, w + 192)), None, splat(f32x4, load_half(f32, w + 208))


def heads(blocks: Sequence[Value]) -> q8k.Heads:
    d = half_to_float(pack([load(u16, block + 208) for block in blocks]))
    return q8k.Heads([opaque(convert(i16x16, load(i8x16, block + 192))) for block in blocks], None, d, None)


FORM = q8k.Form(BLOCK_BYTES, unpack, largest=63, zero=32)
dots, stage, values = q8k.four_dots(FORM, lambda w: unpack(w)[0], heads), q8k.stage(FORM), q8k.values(FORM)
folded = FORM.folded
pieces = q8k.Tile(FORM)
none, begin, add, end, total = pieces.none, pieces.begin, pieces.add, pieces.end, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    q8k.rows_by_four(dots, folded, BLOCK_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    q8k.tile(stage, none, begin, add, end, total, 16, BLOCK_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    q8k.decode(values, BLOCK_BYTES, w, k, out)
