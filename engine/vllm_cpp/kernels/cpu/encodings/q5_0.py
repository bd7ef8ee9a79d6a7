"""Q5_0: 32 values a block: f16 d, 32 fifth bits, 32 x 4 bits; a value is d * (q - 16)."""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import a32, a32_rows
from vllm_cpp.kernels.vectors import Value

BLOCK_BYTES = 22
QUAD_BYTES = a32.QUAD * BLOCK_BYTES


def quants(w: Value) -> tuple[Value, Value]:
    first, second = a32.nibbles(w, 6, BLOCK_BYTES)
    fifth = a32.fifth_bits(w, 2, BLOCK_BYTES)
    return first | fifth[0], second | fifth[1]


FORM = a32.Form(QUAD_BYTES, quants, a32.half_scales, a32.places(BLOCK_BYTES), largest=31, offset=16)
dot, stage, values = a32_rows.dot(FORM), a32.stage(FORM), a32.values(FORM)
pieces = a32.Tile(FORM)
none, block, keep, total = pieces.none, pieces.block, pieces.keep, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    a32_rows.rows(dot, False, QUAD_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    a32.tile(stage, none, block, keep, total, QUAD_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    a32.decode(values, BLOCK_BYTES, w, k, out)
