"""Q5_K: as Q4_K, with 32 bytes of fifth bits before the 4-bit ones: bit r of byte i belongs to value i of the r-th run of 32."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k, q8k_rows
from vllm_cpp.kernels.cpu.encodings.q4_k import ORDER, nibbles
from vllm_cpp.kernels.cpu.encodings.scales6 import d_and_dmin, heads, scales_and_minimums
from vllm_cpp.kernels.simd import join, load, reinterpret, u8x32, u8x64, u16x32
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 176


def quants(w: Value) -> Iterator[Value]:
    """Of a block, 64 at a time."""
    fifth = load(u8x32, w + 16)
    fifth = reinterpret(u16x32, join(fifth, fifth))
    for j in range(4):
        packed = load(u8x32, w + (48 + 32 * j))
        low = reinterpret(u8x64, reinterpret(u16x32, join(packed, packed)) >> constant(u16x32, [0] * 16 + [4] * 16)) & 15
        up, down = ([max(0, sign * (4 - run)) for run in (2 * j, 2 * j + 1)] for sign in (1, -1))
        moved = fifth << constant(u16x32, [up[0]] * 16 + [up[1]] * 16) >> constant(u16x32, [down[0]] * 16 + [down[1]] * 16)
        yield low | (reinterpret(u8x64, moved) & 16)


def unpack(w: Value) -> tuple[Iterator[Value], Value, Value, Value]:
    return quants(w), *scales_and_minimums(w + 4), d_and_dmin(w)


def quants_as_they_lie(w: Value) -> Iterator[Value]:
    """Two runs of 32 a vector: ORDER."""
    fifth = load(u8x32, w + 16)
    fifth = reinterpret(u16x32, join(fifth, fifth))
    for low, runs in zip(nibbles(w + 48), ((0, 2), (1, 3), (4, 6), (5, 7)), strict=True):
        up, down = ([max(0, sign * (4 - run)) for run in runs] for sign in (1, -1))
        moved = fifth << constant(u16x32, [up[0]] * 16 + [up[1]] * 16) >> constant(u16x32, [down[0]] * 16 + [down[1]] * 16)
        yield low | (reinterpret(u8x64, moved) & 16)


WIDE = q8k_rows.Quants(quants_as_they_lie, ORDER)
FORM = q8k.Form(BLOCK_BYTES, unpack, largest=31, sub=32)
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
