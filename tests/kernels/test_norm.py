"""Row norms: within 2e-6 of the naive form (relative to the row's largest value), rows independent of each other and of the threads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
from tests.reference import ops
from vllm_cpp.kernels.cpu import norm
from vllm_cpp.kernels.records import pack

EPS = 1e-5


def rmsnorm(x, weight, out, add=None, count=None, nth=1):
    count = np.array([len(x) if count is None else count], np.int64)
    record = pack(
        norm.RMSNORM_FIELDS,
        count=address(count), x=address(x), x_stride=x.strides[0], width=len(weight), add=address(add), add_stride=0 if add is None else
        add.strides[0], weight=address(weight), eps=EPS, out=address(out), out_stride=out.strides[0],
    )  # fmt: skip
    run([norm.rmsnorm], record, nth)


def rows(n, width, seed=1):
    rng = np.random.default_rng(seed)
    x = np.zeros((n, width + 3), np.float32)  # rows lie further apart than they are wide
    x[:, :width] = rng.standard_normal((n, width)) * 10.0 ** rng.integers(-3, 3, (n, 1))
    return x, rng.standard_normal(width).astype(np.float32)


@pytest.mark.parametrize("width", [8, 16, 40, 576, 2048])
def test_agrees_with_the_naive_norm(width):
    x, weight = rows(7, width)
    out = np.zeros((7, width), np.float32)
    before = x.copy()
    rmsnorm(x, weight, out, nth=3)
    expected = ops.rmsnorm(x[:, :width], weight, EPS)
    assert (np.abs(out - expected).max(1) <= 2e-6 * np.abs(expected).max(1)).all()
    assert np.array_equal(x, before)


def test_in_place_and_after_an_addition_give_the_same_bits():
    x, weight = rows(6, 100)
    y, _ = rows(6, 100, seed=2)
    total, out = x + y, np.zeros((6, 100), np.float32)
    rmsnorm(total.copy(), weight, out)
    added = x.copy()
    fused = np.zeros((6, 100), np.float32)
    rmsnorm(added, weight, fused, add=y, nth=2)
    assert np.array_equal(added[:, :100], total[:, :100])
    assert np.array_equal(fused, out)
    rmsnorm(total, weight, total, nth=5)
    assert np.array_equal(total[:, :100], out)


def test_only_counted_rows_are_touched():
    x, weight = rows(4, 32)
    before = x.copy()
    rmsnorm(x, weight, x, count=3, nth=2)
    assert np.array_equal(x[3], before[3])
    assert not np.array_equal(x[2], before[2])
