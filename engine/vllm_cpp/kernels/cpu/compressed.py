"""Attention over a short window of tokens and, beyond it, over compressed entries that each stand for a block of tokens.

Owns how a block of tokens becomes an entry, which entries a token looks at, attention over window and entries (one head that is key and
value at once), and what a sequence keeps for all this between steps: rings of its last rows, and its entries, in a State. Must not know
architectures. A token's results have the same bits whether the rows they are made of were computed in this step or before it.

`step` fields, in every operation: what stands where in this step. A token's own sequence is its run (`seqs`), whose first token stands at
row `run_starts[run]`; an earlier token of the run is read from the step's rows, one of an earlier step from the ring.
"""

from __future__ import annotations

import math

from numba import types

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.fields import field, index, number, set_index, share
from vllm_cpp.kernels.cpu.norm import norm_row
from vllm_cpp.kernels.simd import f32, f32x16, i64, load, store

LANES = 16
HEADS = 4  # heads that share a pass over what a token looks at
_LOWEST = -1e30  # below any score

STEP_FIELDS = (
    "count",  # address of the int64 number of tokens
    "positions", "seqs", "run_starts", "state_ids",  # i32; see StepArrays
    "state_stride",  # bytes from one sequence's state to the next
)  # fmt: skip
_COUNT, _POSITIONS, _SEQS, _RUN_STARTS, _STATE_IDS, _STATE_STRIDE = range(len(STEP_FIELDS))

KEEP_FIELDS = (
    *STEP_FIELDS,
    "x", "x_stride", "width",  # f32 rows of this step; bytes between two; values kept of each (a multiple of 16)
    "ring", "ring_rows",  # the first sequence's ring: the row of position p stands at p % ring_rows
)  # fmt: skip
_K_X, _K_X_STRIDE, _K_WIDTH, _K_RING, _K_RING_ROWS = range(len(STEP_FIELDS), len(KEEP_FIELDS))

COMPRESS_FIELDS = (
    *STEP_FIELDS,
    "x", "x_stride",  # f32 rows of this step: values, then as many weights (before softmax)
    "width",  # values of an entry, a multiple of 16; a row holds that many values, or (`overlap`) twice as many
    "overlap",  # 1: an entry is also made of the block before; that block's tokens give the first half of their values, its own the second
    "ratio",  # tokens of a block
    "ring", "ring_rows",  # earlier rows, as keep_rows leaves them
    "ape",  # f32[ratio, values of a row]: added to the weights, by place in the block
    "norm", "epsilon",  # f32[width], float: the entry's norm
    "frequencies", "half", "magnitude",  # f64[half]: the last 2 * half values turn (neighbours) to the block's first position
    "entries",  # out: the first sequence's f32[number of blocks, width]
    "scratch", "scratch_stride",  # per thread: compress_scratch_bytes(ratio, width)
)  # fmt: skip
(_C_X, _C_X_STRIDE, _C_WIDTH, _C_OVERLAP, _C_RATIO, _C_RING, _C_RING_ROWS, _C_APE, _C_NORM, _C_EPSILON, _C_FREQUENCIES, _C_HALF,
 _C_MAGNITUDE, _C_ENTRIES, _C_SCRATCH, _C_SCRATCH_STRIDE) = range(len(STEP_FIELDS), len(COMPRESS_FIELDS))  # fmt: skip

SCORE_FIELDS = (
    *STEP_FIELDS,
    "q", "q_stride", "weights", "weights_stride",  # f32[n, n_heads, width], f32[n, n_heads]; bytes between two tokens
    "n_heads", "width", "factor",  # width: a multiple of 16; float
    "ratio", "top",  # tokens of a block; a token that sees at most `top` blocks looks at all of them
    "keys",  # the first sequence's f32[number of blocks, width]
    "scores", "scores_stride",  # f32[n, blocks]; bytes between two tokens
    "ids", "ids_stride", "n_ids",  # out of choose_blocks: i32[n, top], rising; i32[n] how many
)  # fmt: skip
(_S_Q, _S_Q_STRIDE, _S_WEIGHTS, _S_WEIGHTS_STRIDE, _S_N_HEADS, _S_WIDTH, _S_FACTOR, _S_RATIO, _S_TOP, _S_KEYS, _S_SCORES,
 _S_SCORES_STRIDE, _S_IDS, _S_IDS_STRIDE, _S_N_IDS) = range(len(STEP_FIELDS), len(SCORE_FIELDS))  # fmt: skip

ATTEND_FIELDS = (
    *STEP_FIELDS,
    "q", "q_stride", "n_heads", "width",  # f32[n, n_heads, width]; width: a multiple of 16
    "scale",  # float scores are multiplied by
    "sinks",  # f32[n_heads]: a score that takes its share of the weights and gives nothing
    "x", "x_stride",  # f32[n, width] rows of this step: key and value at once
    "ring", "window",  # earlier rows; a token looks at the last `window` tokens, itself among them
    "entries", "ratio",  # the first sequence's entries; 0: there are none
    "ids", "ids_stride", "n_ids",  # which entries (choose_blocks); ids 0: all of complete blocks
    "out", "out_stride",  # f32[n, n_heads, width]
    "max_rows",
    "scratch", "scratch_stride",  # per thread: attend_scratch_bytes(max_rows)
)  # fmt: skip
(_A_Q, _A_Q_STRIDE, _A_N_HEADS, _A_WIDTH, _A_SCALE, _A_SINKS, _A_X, _A_X_STRIDE, _A_RING, _A_WINDOW, _A_ENTRIES, _A_RATIO, _A_IDS,
 _A_IDS_STRIDE, _A_N_IDS, _A_OUT, _A_OUT_STRIDE, _A_MAX_ROWS, _A_SCRATCH,
 _A_SCRATCH_STRIDE) = range(len(STEP_FIELDS), len(ATTEND_FIELDS))  # fmt: skip


def compress_scratch_bytes(ratio: int, width: int) -> int:
    """Bytes a thread needs: addresses of values and of weights' additions for the rows of an entry, and the entry."""
    return 2 * 8 * 2 * ratio + 4 * width + 64


def attend_scratch_bytes(max_rows: int) -> int:
    """Bytes a thread needs: addresses of what a token looks at, and its scores for HEADS heads."""
    return (8 + 4 * HEADS) * (max_rows + LANES) + 64


@jit.inner
def _state_of(args, t):  # type: ignore[no-untyped-def]
    """Bytes from the first sequence's state to that of token t's sequence."""
    return index(field(args, _STATE_IDS), index(field(args, _SEQS), t)) * field(args, _STATE_STRIDE)


@jit.inner
def _row(position, first_position, first_row, x, x_stride, ring, row_bytes, ring_rows):  # type: ignore[no-untyped-def]
    """Where the row of a position stands: among this step's from `first_position` on, else in the ring."""
    if position >= first_position:
        return x + (first_row + position - first_position) * x_stride
    return ring + position % ring_rows * row_bytes


@jit.op
def keep_rows(args, tid, nth):  # type: ignore[no-untyped-def]
    """Bring a run's last rows to its ring. Runs after everything that reads the ring."""
    n, rows, width = field(field(args, _COUNT), 0), field(args, _K_RING_ROWS), field(args, _K_WIDTH)
    for t in range(share(n, 1, tid, nth), share(n, 1, tid + 1, nth)):
        if index(field(args, _RUN_STARTS), index(field(args, _SEQS), t) + 1) - t <= rows:
            to = field(args, _K_RING) + _state_of(args, t) + 4 * width * (index(field(args, _POSITIONS), t) % rows)
            x = field(args, _K_X) + t * field(args, _K_X_STRIDE)
            for i in range(0, width, LANES):
                simd.store(to + 4 * i, simd.load(f32x16, x + 4 * i))


@jit.inner
def _turn_to(x, position, frequencies, half, magnitude):  # type: ignore[no-untyped-def]
    """Turn neighbours of x f32[2 * half] to a position, as rope_table and rope_store would."""
    for i in range(half):
        angle = simd.convert(types.float64, position) * load(types.float64, frequencies + 8 * i)
        cos, sin = simd.convert(f32, math.cos(angle) * magnitude), simd.convert(f32, math.sin(angle) * magnitude)
        a, b = load(f32, x + 8 * i), load(f32, x + 8 * i + 4)
        store(x + 8 * i, a * cos - b * sin)
        store(x + 8 * i + 4, b * cos + a * sin)


@jit.op
def compress(args, tid, nth):  # type: ignore[no-untyped-def]
    """The entry of every block whose last token is among this step's: for each channel a softmax over the block's tokens, their weighted
    sum; normed, turned to the block's first position, stored."""
    n, ratio, width, overlap = field(field(args, _COUNT), 0), field(args, _C_RATIO), field(args, _C_WIDTH), field(args, _C_OVERLAP)
    row = width * (1 + overlap)  # values of a row, and weights
    values = field(args, _C_SCRATCH) + tid * field(args, _C_SCRATCH_STRIDE)
    additions = values + 16 * ratio
    entry = additions + 16 * ratio
    n_done = 0
    for t in range(n):
        position = index(field(args, _POSITIONS), t)
        if (position + 1) % ratio != 0:
            continue
        n_done += 1
        if n_done % nth != tid:
            continue
        first_row = index(field(args, _RUN_STARTS), index(field(args, _SEQS), t))
        first_position, state = index(field(args, _POSITIONS), first_row), _state_of(args, t)
        start = position + 1 - ratio
        begin = max(0, start - ratio) if overlap != 0 else start
        n_rows = position + 1 - begin
        for j in range(n_rows):
            here = _row(
                begin + j, first_position, first_row, field(args, _C_X), field(args, _C_X_STRIDE), field(args, _C_RING) + state,
                8 * row, field(args, _C_RING_ROWS),
            )  # fmt: skip
            half = 4 * width if overlap != 0 and begin + j >= start else 0
            store(values + 8 * j, here + half)
            store(additions + 8 * j, field(args, _C_APE) + 4 * row * ((begin + j) % ratio) + half)
        for i in range(0, width, LANES):
            largest = simd.splat(f32x16, f32(_LOWEST))
            for j in range(n_rows):
                weight = simd.load(f32x16, load(i64, values + 8 * j) + 4 * (row + i))
                largest = simd.maximum(weight + simd.load(f32x16, load(i64, additions + 8 * j) + 4 * i), largest)
            total, weights = simd.zero(f32x16), simd.zero(f32x16)
            for j in range(n_rows):
                here = load(i64, values + 8 * j)
                weight = simd.load(f32x16, here + 4 * (row + i)) + simd.load(f32x16, load(i64, additions + 8 * j) + 4 * i)
                weight = simd.exp(weight - largest)
                weights = weights + weight
                total = simd.fma(weight, simd.load(f32x16, here + 4 * i), total)
            simd.store(entry + 4 * i, total / weights)
        to = field(args, _C_ENTRIES) + state + 4 * width * (start // ratio)
        norm_row(entry, width, field(args, _C_NORM), number(args, _C_EPSILON), to)
        rotated = to + 4 * (width - 2 * field(args, _C_HALF))
        _turn_to(rotated, start, field(args, _C_FREQUENCIES), field(args, _C_HALF), load(types.float64, args + 8 * _C_MAGNITUDE))


@jit.inner
def _dots(a, b, c, d, x, n):  # type: ignore[no-untyped-def]
    """a . x, b . x, c . x, d . x, of n values, a multiple of 16."""
    p, q, r, s = simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16)
    for i in range(0, n, LANES):
        here = simd.load(f32x16, x + 4 * i)
        p, q = simd.fma(simd.load(f32x16, a + 4 * i), here, p), simd.fma(simd.load(f32x16, b + 4 * i), here, q)
        r, s = simd.fma(simd.load(f32x16, c + 4 * i), here, r), simd.fma(simd.load(f32x16, d + 4 * i), here, s)
    return simd.hsum(p), simd.hsum(q), simd.hsum(r), simd.hsum(s)


@jit.op
def score_blocks(args, tid, nth):  # type: ignore[no-untyped-def]
    """score(block) = factor * sum over heads of weight_h * max(q_h . key, 0), where a token has to choose. Every thread takes its share of
    each token's blocks."""
    n, heads, width = field(field(args, _COUNT), 0), field(args, _S_N_HEADS), field(args, _S_WIDTH)
    for t in range(n):
        blocks = (index(field(args, _POSITIONS), t) + 1) // field(args, _S_RATIO)
        if blocks <= field(args, _S_TOP):
            continue
        q, weights = field(args, _S_Q) + t * field(args, _S_Q_STRIDE), field(args, _S_WEIGHTS) + t * field(args, _S_WEIGHTS_STRIDE)
        keys, scores = field(args, _S_KEYS) + _state_of(args, t), field(args, _S_SCORES) + t * field(args, _S_SCORES_STRIDE)
        for j in range(share(blocks, LANES, tid, nth), share(blocks, LANES, tid + 1, nth)):
            total, key, zero = f32(0), keys + 4 * width * j, f32(0)
            for h in range(0, heads, HEADS):  # the last ones are computed twice where heads do not fill a group, and weigh nothing then
                h1, h2, h3 = min(h + 1, heads - 1), min(h + 2, heads - 1), min(h + 3, heads - 1)
                a, b, c, d = _dots(q + 4 * width * h, q + 4 * width * h1, q + 4 * width * h2, q + 4 * width * h3, key, width)
                total = simd.fma(simd.maximum(a, zero), load(f32, weights + 4 * h), total)
                total = simd.fma(simd.maximum(b, zero), load(f32, weights + 4 * h1) if h + 1 < heads else zero, total)
                total = simd.fma(simd.maximum(c, zero), load(f32, weights + 4 * h2) if h + 2 < heads else zero, total)
                total = simd.fma(simd.maximum(d, zero), load(f32, weights + 4 * h3) if h + 3 < heads else zero, total)
            store(scores + 4 * j, total * number(args, _S_FACTOR))


@jit.inner
def _ordered(bits):  # type: ignore[no-untyped-def]
    """A float's bits as an integer that orders as the float does."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit.op
def choose_blocks(args, tid, nth):  # type: ignore[no-untyped-def]
    """The `top` blocks with the highest scores (ties: the earlier), in rising order; all blocks where there are no more. The lowest score
    that is in is found by halving, not by sorting."""
    n, top = field(field(args, _COUNT), 0), field(args, _S_TOP)
    for t in range(tid, n, nth):
        blocks = (index(field(args, _POSITIONS), t) + 1) // field(args, _S_RATIO)
        ids, scores = field(args, _S_IDS) + t * field(args, _S_IDS_STRIDE), field(args, _S_SCORES) + t * field(args, _S_SCORES_STRIDE)
        set_index(field(args, _S_N_IDS), t, min(blocks, top))
        if blocks <= top:
            for j in range(blocks):
                set_index(ids, j, j)
            continue
        low, high = -(1 << 31), (1 << 31) - 1  # at least `top` scores are not below low; fewer are not below high + 1
        while low < high:
            middle = (low + high + 1) >> 1
            reached = 0
            for j in range(blocks):
                reached += _ordered(index(scores, j)) >= middle
            if reached >= top:
                low = middle
            else:
                high = middle - 1
        above = 0
        for j in range(blocks):
            above += _ordered(index(scores, j)) > low
        equal, chosen = top - above, 0
        for j in range(blocks):
            value = _ordered(index(scores, j))
            if value > low or (value == low and equal > 0):
                equal -= value == low
                set_index(ids, chosen, j)
                chosen += 1


@jit.inner
def _weigh(scores, n_rows, sink):  # type: ignore[no-untyped-def]
    """n_rows scores become weights (before division by their sum, which is returned); what stands behind them, to a whole vector, 0."""
    for j in range(n_rows, (n_rows + LANES - 1) & -LANES):
        store(scores + 4 * j, f32(_LOWEST))
    lanes = simd.splat(f32x16, sink)
    for j in range(0, n_rows, LANES):
        lanes = simd.maximum(simd.load(f32x16, scores + 4 * j), lanes)
    largest, weights = simd.hmax(lanes), simd.zero(f32x16)
    for j in range(0, n_rows, LANES):
        weight = simd.exp(simd.load(f32x16, scores + 4 * j) - largest)
        simd.store(scores + 4 * j, weight)
        weights = weights + weight
    return simd.hsum(weights) + simd.exp(sink - largest)


@jit.inner
def _rows_of(args, t, rows):  # type: ignore[no-untyped-def]
    """Addresses of what token t looks at, its window first, to `rows`; how many."""
    width, window, ratio = field(args, _A_WIDTH), field(args, _A_WINDOW), field(args, _A_RATIO)
    position, state = index(field(args, _POSITIONS), t), _state_of(args, t)
    first_row = index(field(args, _RUN_STARTS), index(field(args, _SEQS), t))
    first_position, begin = index(field(args, _POSITIONS), first_row), max(0, position + 1 - window)
    n_rows = position + 1 - begin
    for j in range(n_rows):
        here = _row(
            begin + j,
            first_position,
            first_row,
            field(args, _A_X),
            field(args, _A_X_STRIDE),
            field(args, _A_RING) + state,
            4 * width,
            window,
        )
        store(rows + 8 * j, here)
    if ratio == 0:
        return n_rows
    ids = field(args, _A_IDS)
    entries = index(field(args, _A_N_IDS), t) if ids != 0 else (position + 1) // ratio
    for j in range(entries):
        entry = index(ids + t * field(args, _A_IDS_STRIDE), j) if ids != 0 else j
        store(rows + 8 * (n_rows + j), field(args, _A_ENTRIES) + state + 4 * width * entry)
    return n_rows + entries


@jit.op
def attend(args, tid, nth):  # type: ignore[no-untyped-def]
    """out = softmax(q . rows * scale, a sink beside them) rows, over a token's window and entries. Tokens and groups of HEADS heads are
    shared out; where heads do not fill the last group, its last head is computed again."""
    heads, width, scale = field(args, _A_N_HEADS), field(args, _A_WIDTH), number(args, _A_SCALE)
    groups = (heads + HEADS - 1) // HEADS
    units, known, n_rows = field(field(args, _COUNT), 0) * groups, -1, 0
    rows = field(args, _A_SCRATCH) + tid * field(args, _A_SCRATCH_STRIDE)
    room = 4 * (field(args, _A_MAX_ROWS) + LANES)
    scores0 = rows + 2 * room
    scores1, scores2, scores3 = scores0 + room, scores0 + 2 * room, scores0 + 3 * room
    for unit in range(share(units, 1, tid, nth), share(units, 1, tid + 1, nth)):
        t, h0 = unit // groups, unit % groups * HEADS
        h1, h2, h3 = min(h0 + 1, heads - 1), min(h0 + 2, heads - 1), min(h0 + 3, heads - 1)
        if t != known:
            known, n_rows = t, _rows_of(args, t, rows)
        q, out = field(args, _A_Q) + t * field(args, _A_Q_STRIDE), field(args, _A_OUT) + t * field(args, _A_OUT_STRIDE)
        for j in range(n_rows):
            a, b, c, d = _dots(
                q + 4 * width * h0, q + 4 * width * h1, q + 4 * width * h2, q + 4 * width * h3, load(i64, rows + 8 * j), width
            )
            store(scores0 + 4 * j, a * scale)
            store(scores1 + 4 * j, b * scale)
            store(scores2 + 4 * j, c * scale)
            store(scores3 + 4 * j, d * scale)
        sinks = field(args, _A_SINKS)
        p, r = _weigh(scores0, n_rows, load(f32, sinks + 4 * h0)), _weigh(scores1, n_rows, load(f32, sinks + 4 * h1))
        s, u = _weigh(scores2, n_rows, load(f32, sinks + 4 * h2)), _weigh(scores3, n_rows, load(f32, sinks + 4 * h3))
        for i in range(0, width, LANES):
            a, b, c, d = simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16)
            for j in range(n_rows):
                x = simd.load(f32x16, load(i64, rows + 8 * j) + 4 * i)
                a = simd.fma(x, simd.splat(f32x16, load(f32, scores0 + 4 * j)), a)
                b = simd.fma(x, simd.splat(f32x16, load(f32, scores1 + 4 * j)), b)
                c = simd.fma(x, simd.splat(f32x16, load(f32, scores2 + 4 * j)), c)
                d = simd.fma(x, simd.splat(f32x16, load(f32, scores3 + 4 * j)), d)
            simd.store(out + 4 * (width * h0 + i), a / p)
            simd.store(out + 4 * (width * h1 + i), b / r)
            simd.store(out + 4 * (width * h2 + i), c / s)
            simd.store(out + 4 * (width * h3 + i), d / u)
