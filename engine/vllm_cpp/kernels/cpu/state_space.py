"""Selective state spaces (Mamba, Mamba-2): a state for each channel that decays and takes in the channel's value, token after token.

Owns the two scans and the norm by groups that follows one of them, with one order of arithmetic: a token's output has the same bits however
its sequence is cut into runs, whatever else the step computes and on however many threads. Must not know models, nor where projections
and convolution come from.

The state of sixteen channels stands lane by lane, one vector for each of its `n_state` numbers, so that nothing is summed across lanes. A
thread takes a head (or sixteen channels) of one run, and walks its tokens while that part of the state stays in the first cache.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.elementwise import silu
from vllm_cpp.kernels.cpu.fields import field, index, number, share
from vllm_cpp.kernels.cpu.norm import norm_row
from vllm_cpp.kernels.simd import f32, f32x16
from vllm_cpp.kernels.vectors import Value, unrolled

LANES = 16
WIDE = 4 * LANES  # channels of a head that are computed together
AHEAD = 4  # tokens whose inputs are asked for before their turn

# ops: scan_heads, and scan_channels with heads of one channel
SCAN_FIELDS = (
    "n_runs",  # address of the int64 number of runs
    "run_starts", "state_ids", "positions",  # i32: row of each run's first token and of the end, place of its state, position of each row
    "x", "x_stride",  # f32[n_tokens, n_heads, head_dim]; bytes between two tokens
    "b", "b_stride", "c", "c_stride",  # f32[n_tokens, n_groups, n_state]: what the state takes in, and what is read from it
    "dt", "dt_stride",  # f32[n_tokens, n_heads]: softplus of it is the length of the step
    "z", "z_stride",  # f32[n_tokens, n_heads, head_dim]: the output is multiplied by silu of it
    "a",  # f32[n_heads], or lane by lane f32[n_channels / 16, n_state, 16]: the state's growth, below 0
    "d",  # f32[n_heads]: how much of x is added to the output
    "n_heads", "head_dim", "n_groups", "n_state",
    "state", "state_stride",  # f32[max sequences, state_values(...)]; bytes between two
    "out", "out_stride",  # f32[n_tokens, n_heads, head_dim]; bytes between two tokens; may be z
)  # fmt: skip
(_N_RUNS, _RUN_STARTS, _STATE_IDS, _POSITIONS, _X, _X_STRIDE, _B, _B_STRIDE, _C, _C_STRIDE, _DT, _DT_STRIDE, _Z, _Z_STRIDE,
 _A, _D, _N_HEADS, _HEAD_DIM, _N_GROUPS, _N_STATE, _STATE, _STATE_STRIDE, _OUT, _OUT_STRIDE) = range(len(SCAN_FIELDS))  # fmt: skip

GROUP_NORM_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride",  # f32[n_rows, n_groups, width]; bytes between two rows
    "n_groups", "width",
    "weight",  # f32[n_groups, width]
    "eps",  # float
    "out", "out_stride",  # as x, which it may be
)  # fmt: skip
_G_COUNT, _G_X, _G_X_STRIDE, _G_N_GROUPS, _G_WIDTH, _G_WEIGHT, _G_EPS, _G_OUT, _G_OUT_STRIDE = range(len(GROUP_NORM_FIELDS))


def state_values(n_heads: int, head_dim: int, n_state: int) -> int:
    """float32 values of a sequence's state; channels of scan_channels are one head here, not heads of one."""
    return n_heads * n_state * -(-head_dim // LANES) * LANES


@unrolled
def _whole(n: Value) -> Value:
    """n rounded up to whole vectors."""
    return (n + (LANES - 1)) & -LANES


@unrolled
def _gated(y: Value, x: Value, d: Value, z: Value) -> Value:
    return simd.fma(x, d, y) * silu(z)


@unrolled
def _spare() -> Value:
    """Room for one vector in the stack frame."""
    return simd.stack_bytes(4 * LANES)


@jit.inner
def _load_first(at, n, spare):  # type: ignore[no-untyped-def]
    """The first n values, the other lanes whatever `spare` held: what lies behind them may be unreadable."""
    if n >= LANES:
        return simd.load(f32x16, at)
    for i in range(n):
        simd.store(spare + 4 * i, simd.load(f32, at + 4 * i))
    return simd.load(f32x16, spare)


@jit.inner
def _store_first(at, values, n):  # type: ignore[no-untyped-def]
    """The first n lanes: what lies behind them is another's."""
    if n >= LANES:
        simd.store(at, values)
    else:
        for i in range(n):
            simd.store(at + 4 * i, values[i])


@jit.inner
def _clear(at, vectors):  # type: ignore[no-untyped-def]
    for i in range(vectors):
        simd.store(at + 64 * i, simd.zero(f32x16))


@jit.inner
def _step_of(args, t, head):  # type: ignore[no-untyped-def]
    """The length of one head's step."""
    return simd.softplus(simd.load(f32, field(args, _DT) + t * field(args, _DT_STRIDE) + 4 * head))


@jit.inner
def _scan_wide(args, head, column, begin, end, state):  # type: ignore[no-untyped-def]
    """Tokens begin … end - 1 of 64 channels of a head; `state` f32[n_state, 64]."""
    n_state, channel = field(args, _N_STATE), head * field(args, _HEAD_DIM) + column
    group = head // (field(args, _N_HEADS) // field(args, _N_GROUPS))
    a, d = simd.load(f32, field(args, _A) + 4 * head), simd.load(f32, field(args, _D) + 4 * head)
    for t in range(begin, end):
        step = _step_of(args, t, head)
        decay = simd.exp(step * a)
        x = field(args, _X) + t * field(args, _X_STRIDE) + 4 * channel
        x0, x1, x2, x3 = simd.load(f32x16, x), simd.load(f32x16, x + 64), simd.load(f32x16, x + 128), simd.load(f32x16, x + 192)
        in0, in1, in2, in3 = x0 * step, x1 * step, x2 * step, x3 * step
        y0, y1, y2, y3 = simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16)
        b = field(args, _B) + t * field(args, _B_STRIDE) + 4 * group * n_state
        c = field(args, _C) + t * field(args, _C_STRIDE) + 4 * group * n_state
        at = state
        for n in range(n_state):
            taken, read = simd.load(f32, b + 4 * n), simd.load(f32, c + 4 * n)
            s0 = simd.fma(in0, taken, simd.load(f32x16, at) * decay)
            s1 = simd.fma(in1, taken, simd.load(f32x16, at + 64) * decay)
            s2 = simd.fma(in2, taken, simd.load(f32x16, at + 128) * decay)
            s3 = simd.fma(in3, taken, simd.load(f32x16, at + 192) * decay)
            simd.store(at, s0)
            simd.store(at + 64, s1)
            simd.store(at + 128, s2)
            simd.store(at + 192, s3)
            y0, y1, y2, y3 = simd.fma(s0, read, y0), simd.fma(s1, read, y1), simd.fma(s2, read, y2), simd.fma(s3, read, y3)
            at += 4 * WIDE
        z = field(args, _Z) + t * field(args, _Z_STRIDE) + 4 * channel
        out = field(args, _OUT) + t * field(args, _OUT_STRIDE) + 4 * channel
        simd.store(out, _gated(y0, x0, d, simd.load(f32x16, z)))
        simd.store(out + 64, _gated(y1, x1, d, simd.load(f32x16, z + 64)))
        simd.store(out + 128, _gated(y2, x2, d, simd.load(f32x16, z + 128)))
        simd.store(out + 192, _gated(y3, x3, d, simd.load(f32x16, z + 192)))


@jit.inner
def _scan_narrow(args, head, column, begin, end, state):  # type: ignore[no-untyped-def]
    """The same of 16 channels, or of the last few of a head; `state` f32[n_state, 16]."""
    width, spare = field(args, _HEAD_DIM) - column, _spare()
    simd.store(spare, simd.zero(f32x16))
    n_state, channel = field(args, _N_STATE), head * field(args, _HEAD_DIM) + column
    group = head // (field(args, _N_HEADS) // field(args, _N_GROUPS))
    a, d = simd.load(f32, field(args, _A) + 4 * head), simd.load(f32, field(args, _D) + 4 * head)
    for t in range(begin, end):
        step = _step_of(args, t, head)
        decay = simd.exp(step * a)
        x = _load_first(field(args, _X) + t * field(args, _X_STRIDE) + 4 * channel, width, spare)
        taken_in, y = x * step, simd.zero(f32x16)
        b = field(args, _B) + t * field(args, _B_STRIDE) + 4 * group * n_state
        c = field(args, _C) + t * field(args, _C_STRIDE) + 4 * group * n_state
        for n in range(n_state):
            s = simd.fma(taken_in, simd.load(f32, b + 4 * n), simd.load(f32x16, state + 64 * n) * decay)
            simd.store(state + 64 * n, s)
            y = simd.fma(s, simd.load(f32, c + 4 * n), y)
        z = _load_first(field(args, _Z) + t * field(args, _Z_STRIDE) + 4 * channel, width, spare)
        out = field(args, _OUT) + t * field(args, _OUT_STRIDE) + 4 * channel
        _store_first(out, _gated(y, x, d, z), width)


@jit.op
def scan_heads(args, tid, nth):  # type: ignore[no-untyped-def]
    """Mamba-2, head by head: S = exp(step * a) S + (step * x) ⊗ b; out = (S c + d x) * silu(z), with step = softplus(dt)."""
    starts, n_runs = field(args, _RUN_STARTS), field(field(args, _N_RUNS), 0)
    n_heads, head_dim, n_state = field(args, _N_HEADS), field(args, _HEAD_DIM), field(args, _N_STATE)
    n_tokens = max(1, index(starts, n_runs))
    # shares are cut by tokens, and whoever has the first token of a run has it all
    first, last = share(n_heads * n_tokens, 1, tid, nth), share(n_heads * n_tokens, 1, tid + 1, nth)
    for head in range(first // n_tokens, (last + n_tokens - 1) // n_tokens):
        for run in range(n_runs):
            begin, end = index(starts, run), index(starts, run + 1)
            place = head * n_tokens + begin
            if first <= place < last:
                state = field(args, _STATE) + index(field(args, _STATE_IDS), run) * field(args, _STATE_STRIDE)
                state += 4 * head * n_state * _whole(head_dim)
                if index(field(args, _POSITIONS), begin) == 0:
                    _clear(state, n_state * _whole(head_dim) // LANES)
                column = 0
                while column + WIDE <= head_dim:
                    _scan_wide(args, head, column, begin, end, state + 4 * column * n_state)
                    column += WIDE
                while column < head_dim:
                    _scan_narrow(args, head, column, begin, end, state + 4 * column * n_state)
                    column += LANES


@jit.inner
def _scan_channels(args, channel, begin, end, state):  # type: ignore[no-untyped-def]
    """Tokens begin … end - 1 of 16 channels with decays of their own; `state` f32[n_state, 16]."""
    n_state, width, spare = field(args, _N_STATE), field(args, _N_HEADS) - channel, _spare()
    simd.store(spare, simd.zero(f32x16))
    a = field(args, _A) + 4 * channel * n_state
    d = _load_first(field(args, _D) + 4 * channel, width, spare)
    for t in range(begin, end):
        # sixteen channels of one token after another: rows lie too far apart for the processor to see that coming
        ahead = t + AHEAD
        simd.prefetch(field(args, _DT) + ahead * field(args, _DT_STRIDE) + 4 * channel)
        simd.prefetch(field(args, _X) + ahead * field(args, _X_STRIDE) + 4 * channel)
        simd.prefetch(field(args, _Z) + ahead * field(args, _Z_STRIDE) + 4 * channel)
        step = simd.softplus(_load_first(field(args, _DT) + t * field(args, _DT_STRIDE) + 4 * channel, width, spare))
        x = _load_first(field(args, _X) + t * field(args, _X_STRIDE) + 4 * channel, width, spare)
        taken_in, y = x * step, simd.zero(f32x16)
        b, c = field(args, _B) + t * field(args, _B_STRIDE), field(args, _C) + t * field(args, _C_STRIDE)
        for n in range(n_state):
            decay = simd.exp(step * simd.load(f32x16, a + 64 * n))
            s = simd.fma(taken_in, simd.load(f32, b + 4 * n), simd.load(f32x16, state + 64 * n) * decay)
            simd.store(state + 64 * n, s)
            y = simd.fma(s, simd.load(f32, c + 4 * n), y)
        z = _load_first(field(args, _Z) + t * field(args, _Z_STRIDE) + 4 * channel, width, spare)
        out = field(args, _OUT) + t * field(args, _OUT_STRIDE) + 4 * channel
        _store_first(out, _gated(y, x, d, z), width)


@jit.op
def scan_channels(args, tid, nth):  # type: ignore[no-untyped-def]
    """Mamba, channel by channel: as scan_heads with heads of one channel, but with a decay for each number of a channel's state."""
    starts, n_runs = field(args, _RUN_STARTS), field(field(args, _N_RUNS), 0)
    channels, n_state = field(args, _N_HEADS), field(args, _N_STATE)
    n_tokens, tiles = max(1, index(starts, n_runs)), (channels + LANES - 1) // LANES
    first, last = share(tiles * n_tokens, 1, tid, nth), share(tiles * n_tokens, 1, tid + 1, nth)
    for tile in range(first // n_tokens, (last + n_tokens - 1) // n_tokens):
        for run in range(n_runs):
            begin, end = index(starts, run), index(starts, run + 1)
            place = tile * n_tokens + begin
            if first <= place < last:
                state = field(args, _STATE) + index(field(args, _STATE_IDS), run) * field(args, _STATE_STRIDE) + 64 * tile * n_state
                if index(field(args, _POSITIONS), begin) == 0:
                    _clear(state, n_state)
                _scan_channels(args, LANES * tile, begin, end, state)


@jit.op
def group_norm(args, tid, nth):  # type: ignore[no-untyped-def]
    """out = x / sqrt(mean(x^2) + eps) * weight, group by group of each row."""
    n_groups, width = field(args, _G_N_GROUPS), field(args, _G_WIDTH)
    n = field(field(args, _G_COUNT), 0) * n_groups
    for i in range(share(n, 1, tid, nth), share(n, 1, tid + 1, nth)):
        row, group = i // n_groups, i % n_groups
        x = field(args, _G_X) + row * field(args, _G_X_STRIDE) + 4 * group * width
        out = field(args, _G_OUT) + row * field(args, _G_OUT_STRIDE) + 4 * group * width
        norm_row(x, width, field(args, _G_WEIGHT) + 4 * group * width, number(args, _G_EPS), out)
