"""Operations value by value: activations, biases, additions.

Owns the vector forms of sigmoid and silu; the bits of a value never depend on where in a row it stands. Must not know what the rows mean.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.fields import field, share
from vllm_cpp.kernels.simd import f32, f32x16
from vllm_cpp.kernels.vectors import Value, unrolled

LANES = 16

SWIGLU_FIELDS = (
    "count",  # address of the int64 number of rows
    "gate", "gate_stride", "up", "up_stride",  # f32 rows; bytes between two (both in one buffer: up = gate + 4 * width)
    "width",  # values a row
    "out", "out_stride",  # f32 rows; may be gate or up itself
)  # fmt: skip
_COUNT, _GATE, _GATE_STRIDE, _UP, _UP_STRIDE, _WIDTH, _OUT, _OUT_STRIDE = range(len(SWIGLU_FIELDS))

ADD_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "width",  # f32 rows added to; bytes between two; values a row
    "y", "y_stride",  # f32 rows added (y_stride 0: one row, a bias, added to each)
)  # fmt: skip
_A_COUNT, _A_X, _A_X_STRIDE, _A_WIDTH, _A_Y, _A_Y_STRIDE = range(len(ADD_FIELDS))

GATED_ADD_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "width",  # f32 rows added to; bytes between two; values a row
    "y", "y_stride",  # f32 rows added, each times sigmoid(its gate)
    "gate", "gate_stride",  # one f32 a row; bytes between two
)  # fmt: skip
_G_COUNT, _G_X, _G_X_STRIDE, _G_WIDTH, _G_Y, _G_Y_STRIDE, _G_GATE, _G_GATE_STRIDE = range(len(GATED_ADD_FIELDS))


@unrolled
def sigmoid(x: Value) -> Value:
    return simd.splat(x.type, 1.0) / (simd.exp(-x) + 1.0)


@unrolled
def silu(x: Value) -> Value:
    return x / (simd.exp(-x) + 1.0)


@jit.inner
def swiglu_span(gate, up, out, n):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up, n values; `out` may be gate or up."""
    whole = n & -LANES
    for i in range(0, whole, LANES):
        simd.store(out + 4 * i, silu(simd.load(f32x16, gate + 4 * i)) * simd.load(f32x16, up + 4 * i))
    for i in range(whole, n):
        simd.store(out + 4 * i, silu(simd.load(f32, gate + 4 * i)) * simd.load(f32, up + 4 * i))


@jit.inner
def add_span(x, y, factor, n):  # type: ignore[no-untyped-def]
    """x += y * factor, n values."""
    whole = n & -LANES
    for i in range(0, whole, LANES):
        simd.store(x + 4 * i, simd.load(f32x16, x + 4 * i) + simd.load(f32x16, y + 4 * i) * factor)
    for i in range(whole, n):
        simd.store(x + 4 * i, simd.load(f32, x + 4 * i) + simd.load(f32, y + 4 * i) * factor)


@jit.inner
def span(at, last, width):  # type: ignore[no-untyped-def]
    """The stretch of one row that starts at vector `at` and ends where the row or the share does: row, first column, columns, vector to
    go on at. Rows of `width` values are counted as whole vectors, one row after the other, so that few long rows and many short ones
    share out alike."""
    vectors = (width + LANES - 1) // LANES
    row = at // vectors
    stop = min(last, (row + 1) * vectors)
    column = (at - row * vectors) * LANES
    return row, column, min(width, (stop - row * vectors) * LANES) - column, stop


@jit.op
def swiglu(args, tid, nth):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up."""
    width = field(args, _WIDTH)
    vectors = field(field(args, _COUNT), 0) * ((width + LANES - 1) // LANES)
    at, last = share(vectors, 1, tid, nth), share(vectors, 1, tid + 1, nth)
    while at < last:
        row, column, n, at = span(at, last, width)
        gate = field(args, _GATE) + row * field(args, _GATE_STRIDE) + 4 * column
        up = field(args, _UP) + row * field(args, _UP_STRIDE) + 4 * column
        swiglu_span(gate, up, field(args, _OUT) + row * field(args, _OUT_STRIDE) + 4 * column, n)


@jit.op
def add(args, tid, nth):  # type: ignore[no-untyped-def]
    """x += y."""
    width = field(args, _A_WIDTH)
    vectors = field(field(args, _A_COUNT), 0) * ((width + LANES - 1) // LANES)
    at, last = share(vectors, 1, tid, nth), share(vectors, 1, tid + 1, nth)
    while at < last:
        row, column, n, at = span(at, last, width)
        x = field(args, _A_X) + row * field(args, _A_X_STRIDE) + 4 * column
        add_span(x, field(args, _A_Y) + row * field(args, _A_Y_STRIDE) + 4 * column, f32(1), n)


@jit.op
def gated_add(args, tid, nth):  # type: ignore[no-untyped-def]
    """x += sigmoid(gate of the row) * y."""
    width = field(args, _G_WIDTH)
    vectors = field(field(args, _G_COUNT), 0) * ((width + LANES - 1) // LANES)
    at, last = share(vectors, 1, tid, nth), share(vectors, 1, tid + 1, nth)
    while at < last:
        row, column, n, at = span(at, last, width)
        x = field(args, _G_X) + row * field(args, _G_X_STRIDE) + 4 * column
        factor = sigmoid(simd.load(f32, field(args, _G_GATE) + row * field(args, _G_GATE_STRIDE)))
        add_span(x, field(args, _G_Y) + row * field(args, _G_Y_STRIDE) + 4 * column, factor, n)
