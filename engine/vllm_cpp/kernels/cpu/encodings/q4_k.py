"""Q4_K: 256 values a block: f16 d, f16 dmin, 12 bytes of packed scales, 4 x 32 bytes of 4 bits (low half: one run of 32 values, high
half: the next)."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k, q8k_rows
from vllm_cpp.kernels.cpu.encodings.scales6 import d_and_dmin, heads, scales_and_minimums
from vllm_cpp.kernels.simd import join, load, reinterpret, u8x32, u8x64, u16x32
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 144


def quants(w: Value) -> Iterator[Value]:
    """Of a block, 64 at a time."""
    for j in range(4):
        packed = load(u8x32, w + (16 + 32 * j))
        yield reinterpret(u8x64, reinterpret(u16x32, join(packed, packed)) >> constant(u16x32, [0] * 16 + [4] * 16)) & 15


def unpack(w: Value) -> tuple[Iterator[Value], Value, Value, Value]:
    return quants(w), *scales_and_minimums(w + 4), d_and_dmin(w)


ORDER = ((0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15))


def nibbles(w: Value) -> Iterator[Value]:
    """The 4-bit quants of a block as they lie, two runs of 32 a vector: ORDER."""
    for at in (0, 64):
        packed = load(u8x64, w + at)
        yield packed & 15
        yield packed >> 4


WIDE = q8k_rows.Quants(lambda w: nibbles(w + 16), ORDER)
FORM = q8k.Form(BLOCK_BYTES, unpack, largest=15, sub=32)
dots, stage, values = q8k_rows.four_dots(FORM, heads, WIDE, q8k_rows.Quants(quants)), q8k.stage(FORM), q8k.values(FORM)
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
