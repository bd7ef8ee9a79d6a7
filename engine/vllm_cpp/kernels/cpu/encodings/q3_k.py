"""Q3_K: 256 values a block: 32 bytes of third bits, 64 bytes of low 2 bits, 12 bytes of 6-bit scales, f16 d; a value is d * (scale - 32)
* (q - 4).

Each half of a block (128 values) has 32 low bytes: bits 2r and 2r + 1 of byte i belong to value i of its r-th run of 32. Bit r of third-
bit byte i belongs to value i of the block's r-th run. Scales: bytes 0..7 hold the low four bits of scales 0..7 and, above them, of 8..15;
bits 2r and 2r + 1 of bytes 8..11 the high two bits of scales 4r .. 4r + 3.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k
from vllm_cpp.kernels.simd import (
    convert,
    f32,
    f32x4,
    i16x16,
    join,
    load,
    load_half,
    pack,
    reinterpret,
    splat,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
    u16x32,
    u32,
)
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 110


def unpack(w: Value) -> tuple[list[Value], Value, None, Value]:
    third = load(u8x32, w)
    third = reinterpret(u16x32, join(third, third))
    quants = []
    for half in range(2):
        packed = load(u8x32, w + (32 + 32 * half))
        packed = reinterpret(u16x32, join(packed, packed))
        for pair in range(2):
            low = reinterpret(u8x64, packed >> constant(u16x32, [4 * pair] * 16 + [4 * pair + 2] * 16)) & 3
            run = 4 * half + 2 * pair
            up, down = ([max(0, sign * (2 - r)) for r in (run, run + 1)] for sign in (1, -1))
            moved = third << constant(u16x32, [up[0]] * 16 + [up[1]] * 16) >> constant(u16x32, [down[0]] * 16 + [down[1]] * 16)
            quants.append(low | (reinterpret(u8x64, moved) & 4))
    return quants, _scales(w + 96), None, splat(f32x4, load_half(f32, w + 108))


def _scales(packed: Value) -> Value:
    low = load(u8x8, packed)
    low = join(low & 15, low >> 4)
    high = load(u32, packed + 8)
    high = reinterpret(u8x16, pack([(high >> (2 * r)) & 0x03030303 for r in range(4)]))
    return convert(i16x16, low | (high << 4)) - 32


FORM = q8k.Form(BLOCK_BYTES, unpack, largest=7, zero=4)
dot, finish, stage, values = q8k.dot(FORM), q8k.finish(FORM), q8k.stage(FORM), q8k.values(FORM)
pieces = q8k.Tile(FORM)
none, begin, add, end, total = pieces.none, pieces.begin, pieces.add, pieces.end, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    q8k.rows(dot, finish, BLOCK_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    q8k.tile(stage, none, begin, add, end, total, 16, BLOCK_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    q8k.decode(values, BLOCK_BYTES, w, k, out)
