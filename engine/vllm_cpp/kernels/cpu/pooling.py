"""One vector of a whole text: the hidden states of its tokens pooled, then brought to length 1.

Owns the three kinds of pooling and what a text keeps of them between steps, so that its tokens may come in several runs: the sum of its
rows so far, token by token (MEAN), or one of them (CLS, LAST). Must not know models. The mean is not divided by the number of tokens: that
only changes the length, which becomes 1.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.fields import field, index, share
from vllm_cpp.kernels.simd import f32, f32x16

LANES = 16
MEAN, CLS, LAST = 1, 2, 3  # as the file's key numbers them: all tokens, the first one, the last one

POOL_FIELDS = (
    "runs",  # address of the int64 number of runs
    "starts",  # i32[runs + 1]: row of each run's first token; behind the last run, the number of rows
    "positions",  # i32[n_tokens]; a run that begins at position 0 begins a text
    "ids",  # i32[runs]: the place of each run's text in `state`
    "x", "x_stride", "width",  # f32 rows; bytes between two; values a row
    "kind",  # MEAN, CLS or LAST
    "state", "state_stride",  # f32, a row a text, whole vectors wide; bytes between two
)  # fmt: skip
_RUNS, _STARTS, _POSITIONS, _IDS, _X, _X_STRIDE, _WIDTH, _KIND, _STATE, _STATE_STRIDE = range(len(POOL_FIELDS))

POOLED_FIELDS = (
    "count",  # address of the int64 number of rows wanted
    "rows", "runs_of", "ids",  # i32: rows whose texts end there; run of each row; place of each run's text in `state`
    "state", "state_stride", "width",
    "out", "out_stride",  # f32 rows of length 1, or 0 where the text pools to nothing
)  # fmt: skip
_P_COUNT, _P_ROWS, _P_RUNS_OF, _P_IDS, _P_STATE, _P_STATE_STRIDE, _P_WIDTH, _P_OUT, _P_OUT_STRIDE = range(len(POOLED_FIELDS))


@jit.op
def pool(args, tid, nth):  # type: ignore[no-untyped-def]
    """state = the text's pooled rows, those of this run included. Shared out by (run, 16 columns)."""
    width, kind, x_stride = field(args, _WIDTH), field(args, _KIND), field(args, _X_STRIDE)
    vectors = (width + LANES - 1) // LANES
    units = field(field(args, _RUNS), 0) * vectors
    for unit in range(share(units, 1, tid, nth), share(units, 1, tid + 1, nth)):
        run, column = unit // vectors, unit % vectors * LANES
        start, stop = index(field(args, _STARTS), run), index(field(args, _STARTS), run + 1)
        begins = index(field(args, _POSITIONS), start) == 0
        state = field(args, _STATE) + index(field(args, _IDS), run) * field(args, _STATE_STRIDE) + 4 * column
        if kind == CLS and not begins:
            continue
        first = stop - 1 if kind == LAST else start
        last = start + 1 if kind == CLS else stop
        keeps = kind == MEAN and not begins
        x = field(args, _X) + 4 * column
        if column + LANES <= width:
            total = simd.load(f32x16, state) if keeps else simd.zero(f32x16)
            for t in range(first, last):
                total = total + simd.load(f32x16, x + t * x_stride)
            simd.store(state, total)
        else:
            for i in range(width - column):
                sum_ = simd.load(f32, state + 4 * i) if keeps else f32(0)
                for t in range(first, last):
                    sum_ = sum_ + simd.load(f32, x + t * x_stride + 4 * i)
                simd.store(state + 4 * i, sum_)


@jit.op
def pooled(args, tid, nth):  # type: ignore[no-untyped-def]
    """out = the pooled vector of the text that ends in each wanted row, divided by its length."""
    width = field(args, _P_WIDTH)
    whole = width & -LANES
    for i in range(tid, field(field(args, _P_COUNT), 0), nth):
        run = index(field(args, _P_RUNS_OF), index(field(args, _P_ROWS), i))
        state = field(args, _P_STATE) + index(field(args, _P_IDS), run) * field(args, _P_STATE_STRIDE)
        out = field(args, _P_OUT) + i * field(args, _P_OUT_STRIDE)
        squares = simd.zero(f32x16)
        for j in range(0, whole, LANES):
            u = simd.load(f32x16, state + 4 * j)
            squares = simd.fma(u, u, squares)
        total = simd.hsum(squares)
        for j in range(whole, width):
            value = simd.load(f32, state + 4 * j)
            total = simd.fma(value, value, total)
        factor = f32(1) / simd.sqrt(total) if total > 0 else f32(0)
        for j in range(0, whole, LANES):
            simd.store(out + 4 * j, simd.load(f32x16, state + 4 * j) * factor)
        for j in range(whole, width):
            simd.store(out + 4 * j, simd.load(f32, state + 4 * j) * factor)
