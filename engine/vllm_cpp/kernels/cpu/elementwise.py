"""Operations value by value: activations, biases, additions.

Owns the vector forms of sigmoid and of the activations of feed-forward parts; the bits of a value never depend on where in a row it
stands. Must not know what the rows mean.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.fields import field, number, share
from vllm_cpp.kernels.simd import f32, f32x16
from vllm_cpp.kernels.vectors import Value, unrolled

LANES = 16

# What a hidden unit of a feed-forward part makes of its gate and up values g, u; c is the activation's limit.
SILU = 0  # silu(g) * u
GELU = 1  # gelu(g) * u, in the form with tanh
SQUARED_RELU = 2  # max(u, 0)^2: there is no gate
SHIFTED_SILU = 3  # g' * sigmoid(1.702 g') * (u' + 1), g' = min(g, c), u' = u cut to -c ... c
SILU_THEN_CUT = 4  # min(silu(g), c) * u'
CUT_THEN_SILU = 5  # silu(min(g, c)) * u'
GELU_ALONE = 6  # gelu(u), by way of f16: there is no gate


class Activation(NamedTuple):
    """One of the kinds above and its limit (infinite: nothing is cut), which the first three have none of."""

    kind: int
    limit: float = math.inf

    @property
    def gated(self) -> bool:
        """Whether a gate projection stands beside the up projection."""
        return self.kind not in (SQUARED_RELU, GELU_ALONE)

    def __str__(self) -> str:
        limit = "" if math.isinf(self.limit) else f" within {self.limit:g}"
        return f"{_NAMES[self.kind]}{limit}"


_NAMES = ("silu", "gelu", "squared relu", "shifted silu", "silu, then cut", "cut, then silu", "gelu alone")
SILU_GATED = Activation(SILU)
_GELU_SLOPE, _GELU_CUBE = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715  # (1 + tanh(z)) / 2 is sigmoid(2 z)

ACTIVATE_FIELDS = (
    "count",  # address of the int64 number of rows
    "kind", "limit",  # of the activation; the limit is a float
    "gate", "gate_stride",  # f32 rows; bytes between two; not read where the kind has no gate
    "up", "up_stride",  # the same (both in one buffer: up = gate + 4 * width)
    "width",  # values a row
    "out", "out_stride",  # f32 rows; may be gate or up itself
)  # fmt: skip
_COUNT, _KIND, _LIMIT, _GATE, _GATE_STRIDE, _UP, _UP_STRIDE, _WIDTH, _OUT, _OUT_STRIDE = range(len(ACTIVATE_FIELDS))

ADD_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "width",  # f32 rows added to; bytes between two; values a row
    "y", "y_stride",  # f32 rows added (y_stride 0: one row, a bias, added to each), or 0: nothing is added
    "keep", "factor",  # float: x is multiplied by it before; y is
)  # fmt: skip
_A_COUNT, _A_X, _A_X_STRIDE, _A_WIDTH, _A_Y, _A_Y_STRIDE, _A_KEEP, _A_FACTOR = range(len(ADD_FIELDS))

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


@unrolled
def _squared_relu(x: Value) -> Value:
    above = simd.select(x < 0.0, 0.0, x)
    return above * above


@unrolled
def _gelu_alone(x: Value) -> Value:
    """gelu within -10 ... 10, of x rounded to f16 and rounded to f16, as ggml's table has it; outside 0, or x. Encoders have it everywhere,
    and what they embed is compared with what others embedded: without the rounding it is a thousandth away."""
    h = simd.round_half(x)
    y = simd.round_half(h / (simd.exp(-(h * (_GELU_SLOPE + _GELU_CUBE * (h * h)))) + 1.0))
    return simd.select(x <= -10.0, 0.0, simd.select(x >= 10.0, x, y))


@unrolled
def _cut(x: Value, limit: Value) -> Value:
    """x within -limit ... limit; what is not a number stays so."""
    return simd.select(x > limit, limit, simd.select(x < -limit, -limit, x))


@unrolled
def _general(g: Value, u: Value, before: Value, after: Value, around: Value, shift: Value, slope: Value, cube: Value) -> Value:
    """min(g' * sigmoid(g' * (slope + cube * g'^2)), after) * (u' + shift) for g' = min(g, before) and u' within -around ... around."""
    g = simd.select(g > before, before, g)
    y = g / (simd.exp(-(g * (slope + cube * (g * g)))) + 1.0)
    return simd.select(y > after, after, y) * (_cut(u, around) + shift)


@jit.inner
def activate_span(kind, limit, gate, up, out, n):  # type: ignore[no-untyped-def]
    """out = the activation of gate and up, n values; `out` may be gate or up."""
    whole = n & -LANES
    if kind == SQUARED_RELU:
        for i in range(0, whole, LANES):
            simd.store(out + 4 * i, _squared_relu(simd.load(f32x16, up + 4 * i)))
        for i in range(whole, n):
            simd.store(out + 4 * i, _squared_relu(simd.load(f32, up + 4 * i)))
        return
    if kind == GELU_ALONE:
        for i in range(0, whole, LANES):
            simd.store(out + 4 * i, _gelu_alone(simd.load(f32x16, up + 4 * i)))
        for i in range(whole, n):
            simd.store(out + 4 * i, _gelu_alone(simd.load(f32, up + 4 * i)))
        return
    if kind != SILU:
        no_limit = f32(math.inf)
        slope = f32(_GELU_SLOPE) if kind == GELU else f32(1.702) if kind == SHIFTED_SILU else f32(1)
        cube = f32(_GELU_CUBE) if kind == GELU else f32(0)
        around = no_limit if kind == GELU else limit
        before = no_limit if kind == SILU_THEN_CUT else around
        after = limit if kind == SILU_THEN_CUT else no_limit
        shift = f32(1) if kind == SHIFTED_SILU else f32(0)
        for i in range(0, whole, LANES):
            g, u = simd.load(f32x16, gate + 4 * i), simd.load(f32x16, up + 4 * i)
            simd.store(out + 4 * i, _general(g, u, before, after, around, shift, slope, cube))
        for i in range(whole, n):
            g, u = simd.load(f32, gate + 4 * i), simd.load(f32, up + 4 * i)
            simd.store(out + 4 * i, _general(g, u, before, after, around, shift, slope, cube))
        return
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
def activate(args, tid, nth):  # type: ignore[no-untyped-def]
    """out = the activation of gate and up."""
    width = field(args, _WIDTH)
    vectors = field(field(args, _COUNT), 0) * ((width + LANES - 1) // LANES)
    at, last = share(vectors, 1, tid, nth), share(vectors, 1, tid + 1, nth)
    while at < last:
        row, column, n, at = span(at, last, width)
        gate = field(args, _GATE) + row * field(args, _GATE_STRIDE) + 4 * column
        up = field(args, _UP) + row * field(args, _UP_STRIDE) + 4 * column
        out = field(args, _OUT) + row * field(args, _OUT_STRIDE) + 4 * column
        activate_span(field(args, _KIND), number(args, _LIMIT), gate, up, out, n)


@jit.inner
def _scale_span(x, factor, n):  # type: ignore[no-untyped-def]
    """x *= factor, n values; a factor of 0 clears whatever stands there."""
    whole = n & -LANES
    for i in range(0, whole, LANES):
        simd.store(x + 4 * i, simd.load(f32x16, x + 4 * i) * factor if factor != 0 else simd.zero(f32x16))
    for i in range(whole, n):
        simd.store(x + 4 * i, simd.load(f32, x + 4 * i) * factor if factor != 0 else f32(0))


@jit.op
def add(args, tid, nth):  # type: ignore[no-untyped-def]
    """x = keep * x + factor * y."""
    keep, factor = number(args, _A_KEEP), number(args, _A_FACTOR)
    width = field(args, _A_WIDTH)
    vectors = field(field(args, _A_COUNT), 0) * ((width + LANES - 1) // LANES)
    at, last = share(vectors, 1, tid, nth), share(vectors, 1, tid + 1, nth)
    while at < last:
        row, column, n, at = span(at, last, width)
        x = field(args, _A_X) + row * field(args, _A_X_STRIDE) + 4 * column
        if keep != 1:
            _scale_span(x, keep, n)
        if field(args, _A_Y) != 0:
            add_span(x, field(args, _A_Y) + row * field(args, _A_Y_STRIDE) + 4 * column, factor, n)


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
