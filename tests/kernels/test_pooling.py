"""Pooling of hidden states, against the naive form: the same bits however a text is cut into runs, in any company and on any threads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
from tests.reference import encoder as naive
from vllm_cpp.kernels.cpu import pooling
from vllm_cpp.kernels.records import pack

KINDS = {"mean": pooling.MEAN, "cls": pooling.CLS, "last": pooling.LAST}


class Pool:
    """A pool of three texts."""

    def __init__(self, kind: str, width: int) -> None:
        self.kind, self.width = KINDS[kind], width
        self.state = np.full((3, -(-width // 16) * 16), np.nan, np.float32)

    def step(self, runs: list[tuple[int, int, np.ndarray]], nth: int = 1) -> np.ndarray:
        """runs: (place, position of the first row, rows). The vectors of the texts as they are after them."""
        x = np.concatenate([rows for _, _, rows in runs])
        lengths = [len(rows) for _, _, rows in runs]
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        positions = np.concatenate([np.arange(at, at + len(rows)) for _, at, rows in runs]).astype(np.int32)
        ids, last = np.array([place for place, _, _ in runs], np.int32), (starts[1:] - 1).astype(np.int32)
        runs_of = np.repeat(np.arange(len(runs), dtype=np.int32), lengths)
        count, out = np.array([len(runs)], np.int64), np.full((len(runs), self.width), np.nan, np.float32)
        record = pack(
            pooling.POOL_FIELDS, runs=address(count), starts=address(starts), positions=address(positions), ids=address(ids), x=address(x),
            x_stride=x.strides[0], width=self.width, kind=self.kind, state=address(self.state), state_stride=self.state.strides[0],
        )  # fmt: skip
        run([pooling.pool], record, nth)
        record = pack(
            pooling.POOLED_FIELDS, count=address(count), rows=address(last), runs_of=address(runs_of), ids=address(ids),
            state=address(self.state), state_stride=self.state.strides[0], width=self.width, out=address(out), out_stride=out.strides[0],
        )  # fmt: skip
        run([pooling.pooled], record, nth)
        return out


def text(seed: int, n: int, width: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, width)) + 0.3).astype(np.float32)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("width", [16, 40, 7])
def test_pooled_vectors_have_length_1_and_the_naive_direction(kind: str, width: int) -> None:
    texts = [text(i, n, width) for i, n in enumerate((5, 1, 12))]
    got = Pool(kind, width).step([(2 - i, 0, rows) for i, rows in enumerate(texts)], nth=3)
    assert np.abs(got - [naive.pooled(rows, kind) for rows in texts]).max() < 1e-6
    assert np.abs(np.linalg.norm(got, axis=1) - 1).max() < 1e-6


@pytest.mark.parametrize("kind", list(KINDS))
def test_cuts_and_company_change_no_bit(kind: str) -> None:
    rows, other = text(1, 11, 40), text(2, 6, 40)
    (whole,) = Pool(kind, 40).step([(0, 0, rows)])
    cut = Pool(kind, 40)
    cut.step([(1, 0, other[:2]), (0, 0, rows[:1])], nth=2)
    cut.step([(0, 1, rows[1:7])])
    last = cut.step([(0, 7, rows[7:]), (1, 2, other[2:])], nth=4)
    assert np.array_equal(last[0], whole)
    assert np.array_equal(last[1], Pool(kind, 40).step([(2, 0, other)])[0])


def test_nothing_stays_nothing() -> None:
    assert not Pool("mean", 20).step([(0, 0, np.zeros((3, 20), np.float32))]).any()
