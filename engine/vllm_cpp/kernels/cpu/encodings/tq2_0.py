"""TQ2_0: 256 values a block: 64 bytes of 2 bits, f16 d; a value is d * (q - 1).

Each half of a block (128 values) has 32 bytes: bits 2r and 2r + 1 of byte i belong to value i of its r-th run of 32.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k, q8k_rows, ternary
from vllm_cpp.kernels.simd import join, load, reinterpret, u8x32, u8x64, u16x32
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 66


def unpack(w: Value) -> Iterator[Value]:
    for half in range(2):
        packed = load(u8x32, w + 32 * half)
        packed = reinterpret(u16x32, join(packed, packed))
        for run in (0, 4):
            yield reinterpret(u8x64, packed >> constant(u16x32, [run] * 16 + [run + 2] * 16)) & 3


FORM = ternary.form(BLOCK_BYTES, 64, unpack)
dots = q8k_rows.four_dots(FORM, ternary.heads(64), q8k_rows.Quants(unpack))
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
