"""Four residual streams instead of one: what a half-layer reads of them, and how its result goes back into all of them.

Owns the arithmetic of hyper-connections (Zhu et al. 2024) whose mixing matrix is made doubly stochastic by Sinkhorn's iteration, as
FAMILIES (deepseek4) has it. Must not know what stands between reading and writing.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.elementwise import sigmoid, span
from vllm_cpp.kernels.cpu.fields import field, number, share
from vllm_cpp.kernels.simd import f32, f32x16, load, store

LANES = 16
STREAMS = 4
# A row of coefficients: how much of each stream is read, how much of the result each gets, then stream by stream how much of it goes into
# each.
COEFFICIENTS = STREAMS * (2 + STREAMS)

READ_FIELDS = (
    "count",  # address of the int64 number of tokens
    "mix", "mix_stride",  # f32[n, COEFFICIENTS], or [n, STREAMS] where there is nothing to write; coefficients take its place
    "scale", "base",  # f32[3] (or [1]) and f32[COEFFICIENTS] (or [STREAMS])
    "epsilon", "iterations",  # float; 0: there is nothing to write
    "x", "x_stride", "width",  # f32[n, STREAMS * width]; bytes between two tokens
    "out", "out_stride",  # f32[n, width]
)  # fmt: skip
(_COUNT, _MIX, _MIX_STRIDE, _SCALE, _BASE, _EPSILON, _ITERATIONS, _X, _X_STRIDE, _WIDTH, _OUT, _OUT_STRIDE) = range(len(READ_FIELDS))

WRITE_FIELDS = (
    "count",  # address of the int64 number of tokens
    "mix", "mix_stride",  # coefficients, as read_streams leaves them
    "x", "x_stride", "width",  # f32[n, STREAMS * width], rewritten
    "y", "y_stride",  # f32[n, width]
)  # fmt: skip
_W_COUNT, _W_MIX, _W_MIX_STRIDE, _W_X, _W_X_STRIDE, _W_WIDTH, _W_Y, _W_Y_STRIDE = range(len(WRITE_FIELDS))


@jit.inner
def _divide(c, step, along, epsilon):  # type: ignore[no-untyped-def]
    """Divide by their sum (+ epsilon) the entries `along` bytes apart, for each of the lines that begin `step` bytes apart."""
    for i in range(STREAMS):
        total = f32(0)
        for j in range(STREAMS):
            total = total + load(f32, c + step * i + along * j)
        total = total + epsilon
        for j in range(STREAMS):
            at = c + step * i + along * j
            store(at, load(f32, at) / total)


@jit.inner
def _mixing(c, scale, base, epsilon, iterations):  # type: ignore[no-untyped-def]
    """c f32[source, destination], in place: softmax over each source's destinations, then Sinkhorn's iteration, columns first."""
    for s in range(STREAMS):
        row, largest, total = c + 4 * STREAMS * s, f32(-3.0e38), f32(0)
        for t in range(STREAMS):
            value = load(f32, row + 4 * t) * scale + load(f32, base + 4 * (STREAMS * s + t))
            store(row + 4 * t, value)
            largest = simd.maximum(value, largest)
        for t in range(STREAMS):
            value = simd.exp(load(f32, row + 4 * t) - largest)
            store(row + 4 * t, value)
            total = total + value
        for t in range(STREAMS):
            store(row + 4 * t, load(f32, row + 4 * t) / total + epsilon)
    _divide(c, 4, 4 * STREAMS, epsilon)
    for _ in range(1, iterations):
        _divide(c, 4 * STREAMS, 4, epsilon)
        _divide(c, 4, 4 * STREAMS, epsilon)


@jit.op
def read_streams(args, tid, nth):  # type: ignore[no-untyped-def]
    """mix becomes coefficients; out = the streams' sum, each times what is read of it. Tokens are shared out."""
    n, width, iterations, epsilon = field(field(args, _COUNT), 0), field(args, _WIDTH), field(args, _ITERATIONS), number(args, _EPSILON)
    scale, base = field(args, _SCALE), field(args, _BASE)
    for t in range(share(n, 1, tid, nth), share(n, 1, tid + 1, nth)):
        mix = field(args, _MIX) + t * field(args, _MIX_STRIDE)
        for s in range(STREAMS):
            at = mix + 4 * s
            store(at, sigmoid(load(f32, at) * load(f32, scale) + load(f32, base + 4 * s)) + epsilon)
        if iterations > 0:
            for s in range(STREAMS, 2 * STREAMS):
                at = mix + 4 * s
                store(at, sigmoid(load(f32, at) * load(f32, scale + 4) + load(f32, base + 4 * s)) * f32(2))
            _mixing(mix + 8 * STREAMS, load(f32, scale + 8), base + 8 * STREAMS, epsilon, iterations)
        x, out = field(args, _X) + t * field(args, _X_STRIDE), field(args, _OUT) + t * field(args, _OUT_STRIDE)
        a, b, c, d = load(f32, mix), load(f32, mix + 4), load(f32, mix + 8), load(f32, mix + 12)
        whole = width & -LANES
        for i in range(0, whole, LANES):
            at = x + 4 * i
            total = simd.load(f32x16, at) * a
            total = simd.fma(simd.load(f32x16, at + 4 * width), simd.splat(f32x16, b), total)
            total = simd.fma(simd.load(f32x16, at + 8 * width), simd.splat(f32x16, c), total)
            simd.store(out + 4 * i, simd.fma(simd.load(f32x16, at + 12 * width), simd.splat(f32x16, d), total))
        for i in range(whole, width):
            at = x + 4 * i
            last = simd.fma(load(f32, at + 8 * width), c, simd.fma(load(f32, at + 4 * width), b, load(f32, at) * a))
            store(out + 4 * i, simd.fma(load(f32, at + 12 * width), d, last))


@jit.op
def write_streams(args, tid, nth):  # type: ignore[no-untyped-def]
    """Stream t becomes y times its share plus the old streams, each times what goes from it to t."""
    width = field(args, _W_WIDTH)
    vectors = field(field(args, _W_COUNT), 0) * ((width + LANES - 1) // LANES)
    at, last = share(vectors, 1, tid, nth), share(vectors, 1, tid + 1, nth)
    while at < last:
        row, column, n, at = span(at, last, width)
        mix = field(args, _W_MIX) + row * field(args, _W_MIX_STRIDE)
        x = field(args, _W_X) + row * field(args, _W_X_STRIDE) + 4 * column
        y = field(args, _W_Y) + row * field(args, _W_Y_STRIDE) + 4 * column
        post, c = mix + 4 * STREAMS, mix + 8 * STREAMS
        whole = n & -LANES
        for i in range(0, whole, LANES):
            to = x + 4 * i
            p, q = simd.load(f32x16, to), simd.load(f32x16, to + 4 * width)
            r, s, new = simd.load(f32x16, to + 8 * width), simd.load(f32x16, to + 12 * width), simd.load(f32x16, y + 4 * i)
            for t in range(STREAMS):
                total = new * load(f32, post + 4 * t)
                total = simd.fma(p, simd.splat(f32x16, load(f32, c + 4 * t)), total)
                total = simd.fma(q, simd.splat(f32x16, load(f32, c + 4 * (STREAMS + t))), total)
                total = simd.fma(r, simd.splat(f32x16, load(f32, c + 4 * (2 * STREAMS + t))), total)
                simd.store(to + 4 * width * t, simd.fma(s, simd.splat(f32x16, load(f32, c + 4 * (3 * STREAMS + t))), total))
        for i in range(whole, n):
            to = x + 4 * i
            p, q = load(f32, to), load(f32, to + 4 * width)
            r, s, new = load(f32, to + 8 * width), load(f32, to + 12 * width), load(f32, y + 4 * i)
            for t in range(STREAMS):
                total = simd.fma(p, load(f32, c + 4 * t), new * load(f32, post + 4 * t))
                total = simd.fma(r, load(f32, c + 4 * (2 * STREAMS + t)), simd.fma(q, load(f32, c + 4 * (STREAMS + t)), total))
                store(to + 4 * width * t, simd.fma(s, load(f32, c + 4 * (3 * STREAMS + t)), total))
