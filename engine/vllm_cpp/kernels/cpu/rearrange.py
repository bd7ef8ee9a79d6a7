"""Rows whose blocks stand in another order.

Owns moving values. Must not know what they mean: which block goes where is a table.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.fields import field, index, share
from vllm_cpp.kernels.simd import f32, f32x16

LANES = 16

REARRANGE_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "out", "out_stride",  # f32 rows; bytes between two; not the same
    "width",  # values a block
    "source", "n_blocks",  # i32[n_blocks]: which block of x is block i of out
)  # fmt: skip
_COUNT, _X, _X_STRIDE, _OUT, _OUT_STRIDE, _WIDTH, _SOURCE, _N_BLOCKS = range(len(REARRANGE_FIELDS))


@jit.op
def rearrange(args, tid, nth):  # type: ignore[no-untyped-def]
    """Block i of a row of out = block source[i] of the row of x."""
    n_blocks, width = field(args, _N_BLOCKS), field(args, _WIDTH)
    whole = width & -LANES
    units = field(field(args, _COUNT), 0) * n_blocks
    for unit in range(share(units, 1, tid, nth), share(units, 1, tid + 1, nth)):
        row = unit // n_blocks
        block = unit - row * n_blocks
        x = field(args, _X) + row * field(args, _X_STRIDE) + 4 * width * index(field(args, _SOURCE), block)
        out = field(args, _OUT) + row * field(args, _OUT_STRIDE) + 4 * width * block
        for i in range(0, whole, LANES):
            simd.store(out + 4 * i, simd.load(f32x16, x + 4 * i))
        for i in range(whole, width):
            simd.store(out + 4 * i, simd.load(f32, x + 4 * i))
