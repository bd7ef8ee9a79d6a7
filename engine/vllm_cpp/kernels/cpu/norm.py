"""Root-mean-square norms of rows, with the residual addition that stands before them.

Owns `x / sqrt(mean(x^2) + eps) * weight` for rows and for heads, in one fixed order of summation. Must not know which norm of a model
this is.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.fields import field, number
from vllm_cpp.kernels.simd import f32, f32x16

LANES = 16

RMSNORM_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "width",  # f32 rows; bytes between two; values a row
    "add", "add_stride",  # f32 rows added to x (x is updated) before it is normed; 0: nothing is added
    "weight",  # f32[width], or 0: none
    "eps",  # float
    "out", "out_stride",  # f32 rows; may be x itself
)  # fmt: skip
_COUNT, _X, _X_STRIDE, _WIDTH, _ADD, _ADD_STRIDE, _WEIGHT, _EPS, _OUT, _OUT_STRIDE = range(len(RMSNORM_FIELDS))


@jit.inner
def norm_row(x, width, weight, eps, out):  # type: ignore[no-untyped-def]
    """out = x / sqrt(mean(x^2) + eps) * weight; `out` may be x, `weight` 0: none."""
    whole = width & -LANES
    a, b, c, d = simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16)
    most = width & -(4 * LANES)
    for i in range(0, most, 4 * LANES):  # four sums, so that one addition does not wait for the one before
        at = x + 4 * i
        u, v, w, z = simd.load(f32x16, at), simd.load(f32x16, at + 64), simd.load(f32x16, at + 128), simd.load(f32x16, at + 192)
        a, b, c, d = simd.fma(u, u, a), simd.fma(v, v, b), simd.fma(w, w, c), simd.fma(z, z, d)
    for i in range(most, whole, LANES):
        u = simd.load(f32x16, x + 4 * i)
        a = simd.fma(u, u, a)
    total = simd.hsum((a + b) + (c + d))
    for i in range(whole, width):
        value = simd.load(f32, x + 4 * i)
        total = simd.fma(value, value, total)
    factor = f32(1) / simd.sqrt(total / simd.convert(f32, width) + eps)
    if weight == 0:
        for i in range(0, whole, LANES):
            simd.store(out + 4 * i, simd.load(f32x16, x + 4 * i) * factor)
        for i in range(whole, width):
            simd.store(out + 4 * i, simd.load(f32, x + 4 * i) * factor)
        return
    for i in range(0, whole, LANES):
        simd.store(out + 4 * i, simd.load(f32x16, x + 4 * i) * factor * simd.load(f32x16, weight + 4 * i))
    for i in range(whole, width):
        simd.store(out + 4 * i, simd.load(f32, x + 4 * i) * factor * simd.load(f32, weight + 4 * i))


@jit.inner
def _add_row(x, y, width):  # type: ignore[no-untyped-def]
    whole = width & -LANES
    for i in range(0, whole, LANES):
        simd.store(x + 4 * i, simd.load(f32x16, x + 4 * i) + simd.load(f32x16, y + 4 * i))
    for i in range(whole, width):
        simd.store(x + 4 * i, simd.load(f32, x + 4 * i) + simd.load(f32, y + 4 * i))


@jit.op
def rmsnorm(args, tid, nth):  # type: ignore[no-untyped-def]
    """x += add; out = x / sqrt(mean(x^2) + eps) * weight, row by row."""
    width, add = field(args, _WIDTH), field(args, _ADD)
    for t in range(tid, field(field(args, _COUNT), 0), nth):
        x = field(args, _X) + t * field(args, _X_STRIDE)
        if add != 0:
            _add_row(x, add + t * field(args, _ADD_STRIDE), width)
        norm_row(x, width, field(args, _WEIGHT), number(args, _EPS), field(args, _OUT) + t * field(args, _OUT_STRIDE))
