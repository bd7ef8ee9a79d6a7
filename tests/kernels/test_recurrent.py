"""Recurrent operations against the naive forms; the same bits however prompts are cut, with whatever company, on any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
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
