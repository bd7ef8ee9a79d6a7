"""Residual streams against naive ones; every number of threads gives the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
from tests.reference import ops
from tests.reference.streams import coefficients
from vllm_cpp.kernels.cpu import streams
from vllm_cpp.kernels.records import pack

EPSILON = 1e-3


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def read(mix: np.ndarray, scale: np.ndarray, base: np.ndarray, x: np.ndarray, iterations: int, nth: int) -> tuple[np.ndarray, np.ndarray]:
    """(what is read f32[n, width], coefficients)."""
    n, width = len(x), x.shape[1] // streams.STREAMS
    mix, out, count = mix.copy(), np.zeros((n, width), np.float32), np.array([n], np.int64)
    record = pack(
        streams.READ_FIELDS, count=address(count), mix=address(mix), mix_stride=mix.strides[0], scale=address(scale), base=address(base),
        epsilon=EPSILON, iterations=iterations, x=address(x), x_stride=x.strides[0], width=width, out=address(out),
        out_stride=out.strides[0],
    )  # fmt: skip
    run([streams.read_streams], record, nth)
    return out, mix


@pytest.mark.parametrize("width", [16, 21, 96])
@pytest.mark.parametrize("iterations", [1, 5])
@pytest.mark.parametrize("n", [1, 3])
def test_streams_are_read_and_written(width, iterations, n):
    mix, scale, base = floats(n, 24), np.array([0.5, 1.5, 2.0], np.float32), floats(24, seed=1)
    x, y, count = floats(n, 4 * width, seed=2), floats(n, width, seed=3), np.array([n], np.int64)
    results = []
    for nth in (1, 2, 5):
        out, c = read(mix, scale, base, x, iterations, nth)
        new = x.copy()
        record = pack(
            streams.WRITE_FIELDS, count=address(count), mix=address(c), mix_stride=c.strides[0], x=address(new), x_stride=new.strides[0],
            width=width, y=address(y), y_stride=y.strides[0],
        )  # fmt: skip
        run([streams.write_streams], record, nth)
        results.append(np.concatenate([out, new], 1))
    for t in range(n):
        pre, post, comb = coefficients(mix[t].astype(np.float64), scale, base, EPSILON, iterations)
        old = x[t].reshape(4, width).astype(np.float64)
        expected = np.concatenate([pre @ old, (post[:, None] * y[t] + comb.T @ old).ravel()])
        assert np.abs(results[0][t] - expected).max() < 5e-6
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_only_reading():
    mix, scale, base, x = floats(2, 4), np.array([0.7], np.float32), floats(4, seed=1), floats(2, 64, seed=2)
    pre = ops.sigmoid(mix * scale[0] + base) + EPSILON
    out, _ = read(mix, scale, base, x, 0, 2)
    assert np.abs(out - np.einsum("ts,tsw->tw", pre, x.reshape(2, 4, 16))).max() < 2e-6
