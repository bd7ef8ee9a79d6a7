"""Recurrent operations against the naive forms; the same bits however prompts are cut, with whatever company, on any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
from tests.reference import ops
from tests.reference import recurrent as reference
from vllm_cpp.kernels.cpu import recurrent
from vllm_cpp.kernels.records import pack


class Runs:
    """The step arrays of a sequence of steps. A step is a list of (sequence, number of its tokens)."""

    def __init__(self, n_sequences: int):
        self.done = [0] * n_sequences
        # a sequence's state stands anywhere
        self.places = np.random.default_rng(1).permutation(n_sequences + 2)[:n_sequences]
        self.n_states = n_sequences + 2

    def step(self, parts):
        self.count = np.array([len(parts)], np.int64)
        self.starts = np.cumsum([0] + [n for _, n in parts]).astype(np.int32)
        self.states = np.array([self.places[seq] for seq, _ in parts], np.int32)
        self.positions = np.concatenate([self.done[seq] + np.arange(n) for seq, n in parts]).astype(np.int32)
        self.rows = [(seq, self.done[seq] + i) for seq, n in parts for i in range(n)]
        for seq, n in parts:
            self.done[seq] += n

    def fields(self):
        return {
            "n_runs": address(self.count), "run_starts": address(self.starts), "positions": address(self.positions),
            "state_ids": address(self.states),
        }  # fmt: skip


LENGTHS = [9, 1, 14]
WAYS = {
    "one after another": [[(0, 9)], [(1, 1)], [(2, 14)]],
    "together": [[(2, 14), (0, 9), (1, 1)]],
    "token by token": [[(seq, 1)] for seq, n in enumerate(LENGTHS) for _ in range(n)],
    "cut anywhere": [[(0, 2), (2, 5)], [(1, 1), (2, 1), (0, 3)], [(2, 8)], [(0, 4)]],
}


def garbage(shape):
    return np.full(shape, np.nan, np.float32)


def gather(sequences, rows):
    """The values of a step's rows, in a buffer wider than they are."""
    out = garbage((len(rows), sequences[0].shape[1] + 5))
    for i, (seq, position) in enumerate(rows):
        out[i, : sequences[0].shape[1]] = sequences[seq][position]
    return out


def convolve(xs, weight, way, *, bias=None, silu=True, times=None, gate=None, nth=1):
    channels, taps = weight.shape
    runs = Runs(len(xs))
    turned = np.ascontiguousarray(weight.T)
    state = garbage((runs.n_states, taps - 1, channels + 3))
    results = [garbage((len(x), channels)) for x in xs]
    for parts in way:
        runs.step(parts)
        x, t, g = (None if values is None else gather(values, runs.rows) for values in (xs, times, gate))
        out = garbage((len(x), channels + 1))
        record = pack(
            recurrent.CONVOLUTION_FIELDS, **runs.fields(), x=address(x), x_stride=x.strides[0], times=address(t),
            times_stride=x.strides[0], channels=channels, taps=taps, weight=address(turned), weight_stride=turned.strides[0],
            bias=address(bias), activate=silu, gate=address(g), gate_stride=x.strides[0], out=address(out), out_stride=out.strides[0],
            state=address(state), state_stride=state.strides[0], state_row=state.strides[1],
        )  # fmt: skip
        run([recurrent.convolution], record, nth)
        assert np.isnan(out[:, channels:]).all()
        for i, (seq, position) in enumerate(runs.rows):
            results[seq][position] = out[i, :channels]
    return results


def sequences(width, seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, width)).astype(np.float32) for n in LENGTHS]


@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("channels", [5, 64, 75])
def test_convolution(channels, taps):
    rng = np.random.default_rng(taps)
    weight, bias = rng.standard_normal((channels, taps)).astype(np.float32), rng.standard_normal(channels).astype(np.float32)
    xs = sequences(channels, 2)
    found = convolve(xs, weight, WAYS["one after another"], bias=bias)
    for x, y in zip(xs, found, strict=True):
        expected = reference.silu(reference.convolution(x, weight.astype(np.float64), bias))
        assert np.abs(y - expected).max() <= 2e-6 * np.abs(expected).max()
    for name, way in WAYS.items():
        for nth in (1, 3):
            again = convolve(xs, weight, way, bias=bias, nth=nth)
            assert all(np.array_equal(a, b) for a, b in zip(again, found, strict=True)), (name, nth)


def test_convolution_of_a_product_with_a_gate_and_no_activation():
    weight = np.random.default_rng(8).standard_normal((37, 3)).astype(np.float32)
    xs, times, gate = (sequences(37, seed) for seed in (3, 4, 5))
    found = convolve(xs, weight, WAYS["together"], silu=False, times=times, gate=gate, nth=2)
    for x, t, g, y in zip(xs, times, gate, found, strict=True):
        expected = reference.convolution(x.astype(np.float64) * t, weight.astype(np.float64)) * g
        assert np.abs(y - expected).max() <= 1e-6 * np.abs(expected).max()
    again = convolve(xs, weight, WAYS["cut anywhere"], silu=False, times=times, gate=gate)
    assert all(np.array_equal(a, b) for a, b in zip(again, found, strict=True))


EPS = 1e-6


def delta(xs, way, *, n_key_heads, n_heads, width, rate, shift, grouped=False, bound=0.0, nth=1):
    """xs: rows of q, k, v, alpha, beta side by side. What the delta rule makes of each sequence."""
    keys, values, n_decays = n_key_heads * width, n_heads * width, len(rate)
    runs = Runs(len(xs))
    state = garbage((runs.n_states, recurrent.delta_state_values(n_heads, width) + 16))
    results = [garbage((len(x), values)) for x in xs]
    for parts in way:
        runs.step(parts)
        x = gather(xs, runs.rows)
        count, stride = np.array([len(x)], np.int64), x.strides[0]
        parts_of_x = np.cumsum([0, keys, keys, values, n_decays])
        q, k, v, alpha, beta = (address(x) + 4 * int(first) for first in parts_of_x)
        heads = garbage((n_key_heads, len(x), recurrent.head_row_bytes(width) // 4))
        run([recurrent.delta_heads], pack(
            recurrent.DELTA_HEADS_FIELDS, count=address(count), q=q, q_stride=stride, k=k, k_stride=stride, n_heads=n_key_heads,
            width=width, eps=EPS, scale=width**-0.5, heads=address(heads), head_bytes=heads.strides[0],
        ), nth)  # fmt: skip
        run([recurrent.delta_gates], pack(
            recurrent.DELTA_GATES_FIELDS, count=address(count), alpha=alpha, alpha_stride=stride, n_decays=n_decays,
            rate=address(rate), shift=address(shift), bound=bound, beta=beta, beta_stride=stride, n_betas=n_heads,
        ), nth)  # fmt: skip
        run([recurrent.delta_rule], pack(
            recurrent.DELTA_RULE_FIELDS, **runs.fields(), heads=address(heads), head_bytes=heads.strides[0], n_key_heads=n_key_heads,
            n_heads=n_heads, width=width, grouped=grouped, decay=alpha, decay_stride=stride, per_channel=n_decays > n_heads,
            beta=beta, beta_stride=stride, v=v, v_stride=stride, out=v, out_stride=stride, state=address(state),
            state_stride=state.strides[0],
        ), nth)  # fmt: skip
        assert np.isnan(x[:, xs[0].shape[1] :]).all()
        for i, (seq, position) in enumerate(runs.rows):
            results[seq][position] = x[i, 2 * keys : 2 * keys + values]
    assert np.isnan(state[:, -16:]).all()
    return results


@pytest.mark.parametrize(
    ("n_key_heads", "n_heads", "width", "grouped", "per_channel", "bound"),
    [(2, 6, 16, False, False, 0.0), (2, 6, 16, True, False, 0.0), (1, 1, 128, False, False, 0.0), (3, 3, 32, False, True, 0.0),
     (2, 2, 48, False, True, -5.0)],
)  # fmt: skip
def test_delta_rule(n_key_heads, n_heads, width, grouped, per_channel, bound):
    rng = np.random.default_rng(width)
    n_decays = n_heads * width if per_channel else n_heads
    rate, shift = -rng.uniform(0.05, 1, n_decays).astype(np.float32), rng.uniform(-1, 1, n_decays).astype(np.float32)
    if bound:
        rate = -rate
    setting = {"n_key_heads": n_key_heads, "n_heads": n_heads, "width": width, "grouped": grouped, "rate": rate, "shift": shift}
    xs = sequences(2 * n_key_heads * width + n_heads * width + n_decays + n_heads, width)
    found = delta(xs, WAYS["one after another"], bound=bound, **setting)
    share = n_heads // n_key_heads
    key_heads = [j // share if grouped else j % n_key_heads for j in range(n_heads)]
    expected = []
    for x in xs:
        q, k, v, alpha, beta = np.split(x, np.cumsum([n_key_heads * width] * 2 + [n_heads * width, n_decays]), 1)
        q, k = (reference.l2(part.reshape(len(x), n_key_heads, width), EPS)[:, key_heads] for part in (q, k))
        decay = reference.decays(alpha, rate.astype(np.float64), shift, bound).reshape(len(x), n_heads, -1)
        o = reference.delta_rule(q / np.sqrt(width), k, v.reshape(len(x), n_heads, width), decay, ops.sigmoid(beta))
        expected.append(o.reshape(len(x), -1))
    # one token alone may have a key all but at right angles to its query: what counts is how large values get
    largest = max(np.abs(o).max() for o in expected)
    assert max(np.abs(y - o).max() for y, o in zip(found, expected, strict=True)) <= 1e-6 * largest
    for name, way in WAYS.items():
        for nth in (1, 3, 7):
            again = delta(xs, way, bound=bound, nth=nth, **setting)
            assert all(np.array_equal(a, b) for a, b in zip(again, found, strict=True)), (name, nth)


def test_every_thread_has_its_share_of_the_delta_rule():
    """With many more threads than there is work, nothing is computed twice nor left out."""
    rng = np.random.default_rng(3)
    rate, shift = -rng.uniform(0.05, 1, 1).astype(np.float32), np.zeros(1, np.float32)
    setting = {"n_key_heads": 1, "n_heads": 1, "width": 32, "rate": rate, "shift": shift}
    xs = sequences(3 * 32 + 2, 1)
    alone = delta(xs, WAYS["together"], **setting)
    for nth in (2, 5, 64, 101):
        assert all(np.array_equal(a, b) for a, b in zip(delta(xs, WAYS["together"], nth=nth, **setting), alone, strict=True))


@pytest.mark.parametrize(("activation", "naive"), [(recurrent.SILU, reference.silu), (recurrent.SIGMOID, ops.sigmoid)])
def test_gated_norm(activation, naive):
    rng = np.random.default_rng(7)
    x, gate = (rng.standard_normal((3, 5 * 48 + 7)).astype(np.float32) * 3 for _ in range(2))
    weight, count = rng.standard_normal(48).astype(np.float32), np.array([3], np.int64)
    expected = reference.gated_norm(x[:, :240].reshape(3, 5, 48), weight, EPS, gate[:, :240].reshape(3, 5, 48), naive).reshape(3, 240)
    beyond = x[:, 240:].copy()
    once = None
    for nth in (1, 4):
        out = x.copy()
        run([recurrent.gated_norm], pack(
            recurrent.GATED_NORM_FIELDS, count=address(count), x=address(out), x_stride=out.strides[0], n_heads=5, width=48,
            weight=address(weight), eps=EPS, gate=address(gate), gate_stride=gate.strides[0], activation=activation, out=address(out),
            out_stride=out.strides[0],
        ), nth)  # fmt: skip
        assert np.abs(out[:, :240] - expected).max() <= 2e-6 * np.abs(expected).max()
        assert np.array_equal(out[:, 240:], beyond)
        assert once is None or np.array_equal(out, once)
        once = out
