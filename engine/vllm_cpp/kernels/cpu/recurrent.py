"""Operations whose result a sequence carries from token to token: the causal convolution.

Owns the layouts of what is carried, and the one order of arithmetic: runs are walked token by token, so a token has the same bits however
its prompt was cut, with whatever company and on however many threads. Must not know models, nor who owns a state.

A run is one sequence's consecutive tokens of a step. It finds in its state what the run before left there; a run that starts at position 0
finds garbage and starts from zeros.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.elementwise import silu
from vllm_cpp.kernels.cpu.fields import field, index, share
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
