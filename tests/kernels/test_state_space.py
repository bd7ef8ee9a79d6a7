"""State space scans: within 2e-6 of the naive form (relative to the largest value), and the same bits however tokens come in."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
from tests.reference import state_space as naive
from vllm_cpp.kernels.cpu import state_space
from vllm_cpp.kernels.records import pack

PLACES = 5  # of states


class Sequences:
    """Inputs of a few sequences, and the states and outputs that scanning them in steps leaves behind."""

    def __init__(self, lengths, n_heads, head_dim, n_groups, n_state, channels=False):
        rng = np.random.default_rng(n_heads + 7 * n_state)
        self.shape, self.channels = (n_heads, head_dim, n_groups, n_state), channels
        n, self.lengths = sum(lengths), lengths
        self.x, self.z = (rng.standard_normal((n, n_heads, head_dim)).astype(np.float32) for _ in range(2))
        self.b, self.c = (rng.standard_normal((n, n_groups, n_state)).astype(np.float32) for _ in range(2))
        self.dt = (3 * rng.standard_normal((n, n_heads))).astype(np.float32)
        self.d = rng.standard_normal(n_heads).astype(np.float32)
        self.a = -rng.uniform(0.05, 1, (n_heads, n_state) if channels else n_heads).astype(np.float32)
        values = state_space.state_values(1, n_heads, n_state) if channels else state_space.state_values(n_heads, head_dim, n_state)
        self.states = np.full((PLACES, -(-values // 16) * 16), np.nan, np.float32)  # what stands there at first must not matter
        self.out = np.zeros_like(self.x)

    def rows(self, seq, start, stop):
        first = sum(self.lengths[:seq])
        return slice(first + start, first + stop)

    def step(self, runs, nth=1):
        """Scan runs of (sequence, start, stop, place of its state), and keep their outputs."""
        rows = np.concatenate([np.arange(sum(self.lengths))[self.rows(seq, start, stop)] for seq, start, stop, _ in runs])
        sizes = [stop - start for _, start, stop, _ in runs]
        starts = np.array([0, *np.cumsum(sizes)], np.int32)
        positions = np.concatenate([np.arange(start, stop) for _, start, stop, _ in runs]).astype(np.int32)
        ids, n_runs = np.array([place for *_, place in runs], np.int32), np.array([len(runs)], np.int64)
        n_heads, head_dim, n_groups, n_state = self.shape
        inputs = {}
        for name in ("x", "b", "c", "dt", "z"):
            values = getattr(self, name)[rows].reshape(len(rows), -1)
            inputs[name] = np.full((len(rows), values.shape[1] + 5), np.nan, np.float32)  # rows lie further apart than they are wide
            inputs[name][:, : values.shape[1]] = values
        a = self.a
        if self.channels:
            a = np.zeros((-(-n_heads // 16) * 16, n_state), np.float32)
            a[:n_heads] = self.a
            a = np.ascontiguousarray(a.reshape(-1, 16, n_state).transpose(0, 2, 1))
        out = np.full((len(rows), n_heads * head_dim + 3), np.nan, np.float32)
        record = pack(
            state_space.SCAN_FIELDS, n_runs=address(n_runs), run_starts=address(starts), state_ids=address(ids),
            positions=address(positions),
            **{name: address(values) for name, values in inputs.items()},
            **{f"{name}_stride": values.strides[0] for name, values in inputs.items()},
            a=address(a), d=address(self.d), n_heads=n_heads, head_dim=head_dim, n_groups=n_groups,
            n_state=n_state, state=address(self.states), state_stride=self.states.strides[0], out=address(out), out_stride=out.strides[0],
        )  # fmt: skip
        run([state_space.scan_channels if self.channels else state_space.scan_heads], record, nth)
        assert np.isnan(out[:, n_heads * head_dim :]).all()
        self.out[rows] = out[:, : n_heads * head_dim].reshape(-1, n_heads, head_dim)

    def expected(self, seq):
        rows = self.rows(seq, 0, self.lengths[seq])
        x, b, c, z = (getattr(self, name)[rows].astype(np.float64) for name in ("x", "b", "c", "z"))
        dt = self.dt[rows].astype(np.float64)
        n_heads, head_dim, _, n_state = self.shape
        if self.channels:
            out, _ = naive.mamba(x[:, :, 0], b[:, 0], c[:, 0], dt, z[:, :, 0], self.a, self.d, np.zeros((n_heads, n_state)))
            return out[:, :, None]
        return naive.mamba2(x, b, c, dt, z, self.a, self.d, np.zeros((n_heads, head_dim, n_state)))[0]


# heads, channels of a head, groups, numbers of a channel's state
HEADS = [(4, 32, 2, 16), (6, 32, 3, 32), (2, 64, 1, 128), (3, 144, 3, 8), (5, 12, 1, 5), (2, 87, 2, 16)]
CHANNELS = [(128, 1, 1, 16), (192, 1, 1, 8), (40, 1, 1, 16), (7, 1, 1, 3)]
SHAPES = [(shape, False) for shape in HEADS] + [(shape, True) for shape in CHANNELS]


@pytest.mark.parametrize(("shape", "channels"), SHAPES)
def test_agrees_with_the_naive_scan(shape, channels):
    sequences = Sequences([40], *shape, channels=channels)
    sequences.step([(0, 0, 40, 3)])
    expected = sequences.expected(0)
    assert np.abs(sequences.out - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize(("shape", "channels"), SHAPES)
def test_cuts_company_and_threads_change_no_bit(shape, channels):
    lengths = [23, 9, 30]
    alone = Sequences(lengths, *shape, channels=channels)
    for seq, length in enumerate(lengths):
        alone.step([(seq, 0, length, seq)])
    together = Sequences(lengths, *shape, channels=channels)
    together.step([(2, 0, 11, 4), (0, 0, 1, 0)], nth=3)
    together.step([(0, 1, 2, 0), (1, 0, 9, 2), (2, 11, 12, 4)], nth=2)
    for t in range(2, 23):
        runs = [(0, t, t + 1, 0), (2, t + 10, t + 11, 4)] if t + 11 <= 30 else [(0, t, t + 1, 0)]
        together.step(runs, nth=7)
    assert np.array_equal(together.out, alone.out)
    values = state_space.state_values(1, shape[0], shape[3]) if channels else state_space.state_values(shape[0], shape[1], shape[3])
    n = min(values, 16 * shape[3])  # of a first tile, whose lanes all count
    if (shape[0] if channels else shape[1]) >= 16:
        assert np.array_equal(together.states[[0, 2, 4], :n], alone.states[[0, 1, 2], :n])


def test_a_place_that_another_sequence_left_starts_from_zeros():
    sequences = Sequences([10, 10], *HEADS[0])
    sequences.step([(0, 0, 10, 1)])
    sequences.step([(1, 0, 10, 1)])
    for seq in range(2):
        expected = sequences.expected(seq)
        assert np.abs(sequences.out[sequences.rows(seq, 0, 10)] - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("n_groups", [1, 3])
def test_norm_by_groups(n_groups):
    rng = np.random.default_rng(n_groups)
    x = rng.standard_normal((5, n_groups * 40 + 2)).astype(np.float32)
    weight = rng.standard_normal((n_groups, 40)).astype(np.float32)
    expected = naive.group_norm(x[:, :-2].reshape(5, n_groups, 40), weight, 1e-5).reshape(5, -1)
    answers = []
    for nth in (1, 2, 4):
        values, count = x.copy(), np.array([4], np.int64)
        record = pack(
            state_space.GROUP_NORM_FIELDS, count=address(count), x=address(values), x_stride=values.strides[0], n_groups=n_groups, width=40,
            weight=address(weight), eps=1e-5, out=address(values), out_stride=values.strides[0],
        )  # fmt: skip
        run([state_space.group_norm], record, nth)
        assert np.array_equal(values[4], x[4])
        assert np.array_equal(values[:, -2:], x[:, -2:])
        answers.append(values[:4, :-2])
    assert np.abs(answers[0] - expected[:4]).max() <= 2e-6 * np.abs(expected).max()
    assert all(np.array_equal(answer, answers[0]) for answer in answers)
