"""Operations whose result a sequence carries from token to token: the causal convolution and the delta rule, with what stands around it.

Owns the layouts of what is carried, and the one order of arithmetic: runs are walked token by token, so a token has the same bits however
its prompt was cut, with whatever company and on however many threads. Must not know models, nor who owns a state.

A run is one sequence's consecutive tokens of a step. It finds in its state what the run before left there; a run that starts at position 0
finds garbage and starts from zeros.

The delta rule keeps a matrix S (key channel, value channel) for each value head, and for each token with key k, query q and value v:

    S = diag(a) S;  delta = beta (v - Sᵀ k);  S = S + k deltaᵀ;  o = Sᵀ q

Every column of S goes its own way, so a thread takes sixteen of them (a tile, which stays in the first cache) through all tokens of a run.
What a token adds to a tile is put off until the next token reads it: one pass over the tile a token adds k deltaᵀ of the token before,
decays, and takes the products with k and with q; then o = (diag(a) S)ᵀ q + (k · q) delta. A chunk of tokens in matrix form needs as many
products for heads of 128 channels and 64 tokens a chunk.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.elementwise import sigmoid, silu, span
from vllm_cpp.kernels.cpu.fields import field, index, number, share
from vllm_cpp.kernels.simd import f32, f32x16

LANES = 16

CONVOLUTION_FIELDS = (
    "n_runs",  # address of the int64 number of runs
    "run_starts", "positions", "state_ids",  # i32: row of a run's first token (one more than runs); position of a row; state of a run
    "x", "x_stride",  # f32[tokens, channels]; bytes between two tokens
    "times", "times_stride",  # f32 rows the input is multiplied by; 0: by nothing
    "channels", "taps",
    "weight", "weight_stride",  # f32[taps, channels], the last for the current token; bytes between two taps
    "bias",  # f32[channels] or 0
    "activate",  # whether silu comes after the bias
    "gate", "gate_stride",  # f32 rows the result is multiplied by; 0: by nothing
    "out", "out_stride",  # f32[tokens, channels]; not x
    "state", "state_stride", "state_row",  # the last taps - 1 inputs, oldest first; bytes between two sequences and between two inputs
)  # fmt: skip
(_N_RUNS, _RUN_STARTS, _POSITIONS, _STATE_IDS, _X, _X_STRIDE, _TIMES, _TIMES_STRIDE, _CHANNELS, _TAPS, _WEIGHT, _WEIGHT_STRIDE, _BIAS,
 _ACTIVATE, _GATE, _GATE_STRIDE, _OUT, _OUT_STRIDE, _STATE, _STATE_STRIDE, _STATE_ROW) = range(len(CONVOLUTION_FIELDS))  # fmt: skip

DELTA_HEADS_FIELDS = (
    "count",  # address of the int64 number of tokens
    "q", "q_stride", "k", "k_stride",  # f32[tokens, n_heads, width]; bytes between two tokens
    "n_heads", "width",  # key heads; their channels, a multiple of 16
    "eps", "scale",  # floats: added to the sum of squares; what normed queries are multiplied by
    "heads", "head_bytes",  # out: a record a token (head_row_bytes) in each head; bytes between two heads
)  # fmt: skip
(_H_COUNT, _H_Q, _H_Q_STRIDE, _H_K, _H_K_STRIDE, _H_N_HEADS, _H_WIDTH, _H_EPS, _H_SCALE, _H_HEADS,
 _H_HEAD_BYTES) = range(len(DELTA_HEADS_FIELDS))  # fmt: skip

DELTA_GATES_FIELDS = (
    "count",  # address of the int64 number of tokens
    "alpha", "alpha_stride", "n_decays",  # f32[tokens, n_decays], becoming decays; bytes between two tokens
    "rate", "shift",  # f32[n_decays]
    "bound",  # float: 0: decay = exp(rate * softplus(alpha + shift)); else exp(bound * sigmoid(rate * (alpha + shift)))
    "beta", "beta_stride", "n_betas",  # f32[tokens, n_betas], becoming sigmoid(beta)
)  # fmt: skip
(_D_COUNT, _D_ALPHA, _D_ALPHA_STRIDE, _D_N_DECAYS, _D_RATE, _D_SHIFT, _D_BOUND, _D_BETA, _D_BETA_STRIDE,
 _D_N_BETAS) = range(len(DELTA_GATES_FIELDS))  # fmt: skip

DELTA_RULE_FIELDS = (
    "n_runs", "run_starts", "positions", "state_ids",  # as above
    "heads", "head_bytes",  # of delta_heads
    "n_key_heads", "n_heads", "width",  # of keys; of values, a multiple of them; channels of each
    "grouped",  # whether neighbouring value heads share a key head; else value head j has key head j % n_key_heads
    "decay", "decay_stride", "per_channel",  # f32[tokens, n_heads] or, per key channel, [tokens, n_heads, width]
    "beta", "beta_stride",  # f32[tokens, n_heads]
    "v", "v_stride", "out", "out_stride",  # f32[tokens, n_heads, width]; out may be v
    "state", "state_stride",  # f32[n_heads, width / 16, width, 16]: tile after tile of S; bytes between two sequences
)  # fmt: skip
(_R_N_RUNS, _R_RUN_STARTS, _R_POSITIONS, _R_STATE_IDS, _R_HEADS, _R_HEAD_BYTES, _R_N_KEY_HEADS, _R_N_HEADS, _R_WIDTH, _R_GROUPED,
 _R_DECAY, _R_DECAY_STRIDE, _R_PER_CHANNEL, _R_BETA, _R_BETA_STRIDE, _R_V, _R_V_STRIDE, _R_OUT, _R_OUT_STRIDE, _R_STATE,
 _R_STATE_STRIDE) = range(len(DELTA_RULE_FIELDS))  # fmt: skip

_AHEAD = 3  # tokens: how far ahead values and results are asked for

SILU, SIGMOID = range(2)  # what becomes of the gate of a gated norm

GATED_NORM_FIELDS = (
    "count",  # address of the int64 number of tokens
    "x", "x_stride", "n_heads", "width",  # f32[tokens, n_heads, width]; bytes between two tokens; the width is a multiple of 16
    "weight", "eps",  # f32[width]; float
    "gate", "gate_stride", "activation",  # f32[tokens, n_heads, width]; SILU or SIGMOID
    "out", "out_stride",  # f32[tokens, n_heads, width]; may be x
)  # fmt: skip
(_N_COUNT, _N_X, _N_X_STRIDE, _N_N_HEADS, _N_WIDTH, _N_WEIGHT, _N_EPS, _N_GATE, _N_GATE_STRIDE, _N_ACTIVATION, _N_OUT,
 _N_OUT_STRIDE) = range(len(GATED_NORM_FIELDS))  # fmt: skip


def head_row_bytes(width: int) -> int:
    """Bytes of what delta_heads leaves of a token in one head: normed key, normed query, their product."""
    return 4 * (2 * width + LANES)


def delta_state_values(n_heads: int, width: int) -> int:
    """Float32 values of a sequence's state."""
    return n_heads * width * width


@jit.inner
def _input(args, kind, state, start, t, at):  # type: ignore[no-untyped-def]
    """What enters the convolution for token t (a row of the step): of a token before `start`, the run's first, the state knows. `at`:
    bytes from the first channel to the wanted ones."""
    if t < start:
        return simd.load(kind, state + (field(args, _TAPS) - 1 - (start - t)) * field(args, _STATE_ROW) + at)
    value = simd.load(kind, field(args, _X) + t * field(args, _X_STRIDE) + at)
    if field(args, _TIMES) != 0:
        value = value * simd.load(kind, field(args, _TIMES) + t * field(args, _TIMES_STRIDE) + at)
    return value


@jit.inner
def _convolve(args, kind, state, start, t, at):  # type: ignore[no-untyped-def]
    """The result for token t in the channels at `at`: one (f32) or sixteen (f32x16), with the same bits."""
    taps = field(args, _TAPS)
    total = simd.zero(kind)
    if field(args, _BIAS) != 0:
        total = simd.load(kind, field(args, _BIAS) + at)
    for k in range(taps):
        weight = simd.load(kind, field(args, _WEIGHT) + k * field(args, _WEIGHT_STRIDE) + at)
        total = simd.fma(weight, _input(args, kind, state, start, t - (taps - 1) + k, at), total)
    if field(args, _ACTIVATE) != 0:
        total = silu(total)
    if field(args, _GATE) != 0:
        total = total * simd.load(kind, field(args, _GATE) + t * field(args, _GATE_STRIDE) + at)
    simd.store(field(args, _OUT) + t * field(args, _OUT_STRIDE) + at, total)


@jit.inner
def _remember(args, kind, state, start, stop, at):  # type: ignore[no-untyped-def]
    """The state after the run: what entered with the last taps - 1 tokens. Oldest first, so that nothing is overwritten that is still to
    be moved."""
    past = field(args, _TAPS) - 1
    for j in range(past):
        simd.store(state + j * field(args, _STATE_ROW) + at, _input(args, kind, state, start, stop - past + j, at))


@jit.inner
def _forget(args, kind, state, at):  # type: ignore[no-untyped-def]
    for j in range(field(args, _TAPS) - 1):
        simd.store(state + j * field(args, _STATE_ROW) + at, simd.zero(kind))


@jit.op
def convolution(args, tid, nth):  # type: ignore[no-untyped-def]
    """out_t = silu(bias + sum over k of weight[k] * input_{t - taps + 1 + k}) * gate_t channel by channel, input = x * times. Threads
    share out the channels."""
    channels = field(args, _CHANNELS)
    vectors = (channels + LANES - 1) // LANES
    first, last = LANES * share(vectors, 1, tid, nth), min(channels, LANES * share(vectors, 1, tid + 1, nth))
    whole = first + ((last - first) & -LANES)
    for run in range(field(field(args, _N_RUNS), 0)):
        start, stop = index(field(args, _RUN_STARTS), run), index(field(args, _RUN_STARTS), run + 1)
        state = field(args, _STATE) + index(field(args, _STATE_IDS), run) * field(args, _STATE_STRIDE)
        if index(field(args, _POSITIONS), start) == 0:
            for c in range(first, whole, LANES):
                _forget(args, f32x16, state, 4 * c)
            for c in range(whole, last):
                _forget(args, f32, state, 4 * c)
        for t in range(start, stop):
            for c in range(first, whole, LANES):
                _convolve(args, f32x16, state, start, t, 4 * c)
            for c in range(whole, last):
                _convolve(args, f32, state, start, t, 4 * c)
        for c in range(first, whole, LANES):
            _remember(args, f32x16, state, start, stop, 4 * c)
        for c in range(whole, last):
            _remember(args, f32, state, start, stop, 4 * c)


@jit.inner
def _sum_of_squares(x, width):  # type: ignore[no-untyped-def]
    total = simd.zero(f32x16)
    for c in range(0, width, LANES):
        value = simd.load(f32x16, x + 4 * c)
        total = simd.fma(value, value, total)
    return simd.hsum(total)


@jit.op
def delta_heads(args, tid, nth):  # type: ignore[no-untyped-def]
    """k = k / sqrt(sum(k^2) + eps), q likewise times scale, and k · q, head by head, laid out as the delta rule walks them."""
    n_heads, width = field(args, _H_N_HEADS), field(args, _H_WIDTH)
    row_bytes = 4 * (2 * width + LANES)
    units = field(field(args, _H_COUNT), 0) * n_heads
    for unit in range(share(units, 1, tid, nth), share(units, 1, tid + 1, nth)):
        t = unit // n_heads
        head = unit - t * n_heads
        q = field(args, _H_Q) + t * field(args, _H_Q_STRIDE) + 4 * head * width
        k = field(args, _H_K) + t * field(args, _H_K_STRIDE) + 4 * head * width
        out = field(args, _H_HEADS) + head * field(args, _H_HEAD_BYTES) + t * row_bytes
        q_factor = number(args, _H_SCALE) / simd.sqrt(_sum_of_squares(q, width) + number(args, _H_EPS))
        k_factor = f32(1) / simd.sqrt(_sum_of_squares(k, width) + number(args, _H_EPS))
        both = simd.zero(f32x16)
        for c in range(0, width, LANES):
            key, query = simd.load(f32x16, k + 4 * c) * k_factor, simd.load(f32x16, q + 4 * c) * q_factor
            both = simd.fma(key, query, both)
            simd.store(out + 4 * c, key)
            simd.store(out + 4 * (width + c), query)
        simd.store(out + 8 * width, simd.hsum(both))


@jit.inner
def _decay(args, kind, at, i):  # type: ignore[no-untyped-def]
    """Decays in place: one (f32) or sixteen (f32x16) from number i on."""
    x = simd.load(kind, at) + simd.load(kind, field(args, _D_SHIFT) + 4 * i)
    rate, bound = simd.load(kind, field(args, _D_RATE) + 4 * i), number(args, _D_BOUND)
    if bound == 0:
        simd.store(at, simd.exp(rate * simd.softplus(x)))
    else:
        simd.store(at, simd.exp(sigmoid(rate * x) * bound))


@jit.op
def delta_gates(args, tid, nth):  # type: ignore[no-untyped-def]
    """Decays and betas of the tokens, in place."""
    count, width = field(field(args, _D_COUNT), 0), field(args, _D_N_DECAYS)
    vectors = count * ((width + LANES - 1) // LANES)
    at, last = share(vectors, 1, tid, nth), share(vectors, 1, tid + 1, nth)
    while at < last:
        row, column, n, at = span(at, last, width)
        alpha = field(args, _D_ALPHA) + row * field(args, _D_ALPHA_STRIDE)
        whole = column + (n & -LANES)
        for i in range(column, whole, LANES):
            _decay(args, f32x16, alpha + 4 * i, i)
        for i in range(whole, column + n):
            _decay(args, f32, alpha + 4 * i, i)
    width = field(args, _D_N_BETAS)
    vectors = count * ((width + LANES - 1) // LANES)
    at, last = share(vectors, 1, tid, nth), share(vectors, 1, tid + 1, nth)
    while at < last:
        row, column, n, at = span(at, last, width)
        beta = field(args, _D_BETA) + row * field(args, _D_BETA_STRIDE)
        whole = column + (n & -LANES)
        for i in range(column, whole, LANES):
            simd.store(beta + 4 * i, sigmoid(simd.load(f32x16, beta + 4 * i)))
        for i in range(whole, column + n):
            simd.store(beta + 4 * i, sigmoid(simd.load(f32, beta + 4 * i)))


@jit.inner
def _pass(tile, width, before, delta, decay, decay_step, key):  # type: ignore[no-untyped-def]
    """tile = diag(decay) (tile + before deltaᵀ); its products with the key and with the query that stands behind the key. Two rows at a
    time into two sums, so that one product does not wait for the one before."""
    query = key + 4 * width
    with_key, with_key_2 = simd.zero(f32x16), simd.zero(f32x16)
    with_query, with_query_2 = simd.zero(f32x16), simd.zero(f32x16)
    for c in range(0, width, 2):
        s = simd.fma(simd.load(f32, before + 4 * c), delta, simd.load(f32x16, tile + 64 * c))
        s = s * simd.load(f32, decay + decay_step * c)
        s_2 = simd.fma(simd.load(f32, before + 4 * c + 4), delta, simd.load(f32x16, tile + 64 * c + 64))
        s_2 = s_2 * simd.load(f32, decay + decay_step * (c + 1))
        with_key = simd.fma(s, simd.load(f32, key + 4 * c), with_key)
        with_query = simd.fma(s, simd.load(f32, query + 4 * c), with_query)
        with_key_2 = simd.fma(s_2, simd.load(f32, key + 4 * c + 4), with_key_2)
        with_query_2 = simd.fma(s_2, simd.load(f32, query + 4 * c + 4), with_query_2)
        simd.store(tile + 64 * c, s)
        simd.store(tile + 64 * c + 64, s_2)
    return with_key + with_key_2, with_query + with_query_2


@jit.inner
def _walk(args, run, head, part, start, stop):  # type: ignore[no-untyped-def]
    """Take one tile of a value head through the tokens of a run."""
    width, n_key_heads = field(args, _R_WIDTH), field(args, _R_N_KEY_HEADS)
    row_bytes = 4 * (2 * width + LANES)
    tile = field(args, _R_STATE) + index(field(args, _R_STATE_IDS), run) * field(args, _R_STATE_STRIDE)
    tile += 4 * width * (head * width + part * LANES)
    if index(field(args, _R_POSITIONS), start) == 0:
        for c in range(width):
            simd.store(tile + 64 * c, simd.zero(f32x16))
    key_head = head // (field(args, _R_N_HEADS) // n_key_heads) if field(args, _R_GROUPED) != 0 else head % n_key_heads
    key = field(args, _R_HEADS) + key_head * field(args, _R_HEAD_BYTES) + start * row_bytes
    decay_step = 4 if field(args, _R_PER_CHANNEL) != 0 else 0
    decay = field(args, _R_DECAY) + start * field(args, _R_DECAY_STRIDE) + 4 * head * (width if decay_step != 0 else 1)
    beta = field(args, _R_BETA) + start * field(args, _R_BETA_STRIDE) + 4 * head
    column = 4 * (head * width + part * LANES)
    v = field(args, _R_V) + start * field(args, _R_V_STRIDE) + column
    out = field(args, _R_OUT) + start * field(args, _R_OUT_STRIDE) + column
    before, delta = key, simd.zero(f32x16)
    for _ in range(start, stop):
        simd.prefetch(v + _AHEAD * field(args, _R_V_STRIDE))  # a row of all heads further on: no prefetcher of the CPU's sees that
        simd.prefetch(out + _AHEAD * field(args, _R_OUT_STRIDE))
        with_key, with_query = _pass(tile, width, before, delta, decay, decay_step, key)
        delta = (simd.load(f32x16, v) - with_key) * simd.load(f32, beta)
        simd.store(out, simd.fma(simd.load(f32, key + 8 * width), delta, with_query))
        before = key
        key += row_bytes
        decay += field(args, _R_DECAY_STRIDE)
        beta += field(args, _R_BETA_STRIDE)
        v += field(args, _R_V_STRIDE)
        out += field(args, _R_OUT_STRIDE)
    for c in range(width):
        simd.store(tile + 64 * c, simd.fma(simd.load(f32, before + 4 * c), delta, simd.load(f32x16, tile + 64 * c)))


@jit.op
def delta_rule(args, tid, nth):  # type: ignore[no-untyped-def]
    """out = the delta rule over the tokens of every run. Threads share out runs, heads and tiles, a tile counting as often as its run has
    tokens."""
    tiles = field(args, _R_WIDTH) // LANES
    units = field(args, _R_N_HEADS) * tiles
    n_runs, starts = field(field(args, _R_N_RUNS), 0), field(args, _R_RUN_STARTS)
    work = index(starts, n_runs) * units
    begin, end = work * tid // nth, work * (tid + 1) // nth
    for run in range(n_runs):
        start, stop = index(starts, run), index(starts, run + 1)
        tokens, done = stop - start, start * units
        first = max(0, (begin - done + tokens - 1) // tokens)
        last = min(units, (end - done + tokens - 1) // tokens)
        for unit in range(first, last):
            _walk(args, run, unit // tiles, unit % tiles, start, stop)


@jit.op
def gated_norm(args, tid, nth):  # type: ignore[no-untyped-def]
    """out = x / sqrt(mean(x^2) + eps) * weight * activation(gate), head by head."""
    n_heads, width, weight = field(args, _N_N_HEADS), field(args, _N_WIDTH), field(args, _N_WEIGHT)
    units = field(field(args, _N_COUNT), 0) * n_heads
    for unit in range(share(units, 1, tid, nth), share(units, 1, tid + 1, nth)):
        t = unit // n_heads
        column = 4 * (unit - t * n_heads) * width
        x = field(args, _N_X) + t * field(args, _N_X_STRIDE) + column
        gate = field(args, _N_GATE) + t * field(args, _N_GATE_STRIDE) + column
        out = field(args, _N_OUT) + t * field(args, _N_OUT_STRIDE) + column
        factor = f32(1) / simd.sqrt(_sum_of_squares(x, width) / simd.convert(f32, width) + number(args, _N_EPS))
        for c in range(0, width, LANES):
            normed = simd.load(f32x16, x + 4 * c) * factor * simd.load(f32x16, weight + 4 * c)
            z = simd.load(f32x16, gate + 4 * c)
            simd.store(out + 4 * c, normed * (silu(z) if field(args, _N_ACTIVATION) == SILU else sigmoid(z)))
