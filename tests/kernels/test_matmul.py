"""Matrix products against naive ones, with every number of threads giving the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
from vllm_cpp.kernels.cpu import embedding, matmul
from vllm_cpp.kernels.cpu.registry import encoding_kernels, tile_scratch_bytes
from vllm_cpp.kernels.records import pack

K = 96


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def product(x: np.ndarray, w: np.ndarray, out: np.ndarray, *, bias=None, scale=None, accumulate=False, nth=1) -> None:
    """out (+)= x wᵀ * scale + bias through the op."""
    kernels, tile_bytes, n = encoding_kernels("F32"), tile_scratch_bytes(w.shape[1]), len(x)
    stride = matmul.scratch_bytes(n, tile_bytes)
    count, scratch = np.array([n], np.int64), np.full(stride * nth, 0xFF, np.uint8)
    record = pack(
        matmul.FIELDS, count=address(count), act=address(x), act_stride=x.strides[0], w=address(w), w_stride=w.strides[0], k=w.shape[1],
        n_rows=len(w), out=address(out), out_stride=out.strides[0], rows_fn=kernels.rows_address, tile_fn=kernels.tile_address,
        bias=address(bias), scale=address(scale), accumulate=accumulate, scratch=address(scratch), scratch_stride=stride,
        tile_scratch_bytes=tile_bytes, max_count=n,
    )  # fmt: skip
    run([matmul.matmul], record, nth)


@pytest.mark.parametrize("n_rows", [1, 16, 63, 200])
@pytest.mark.parametrize("n_tokens", [1, 2, 7])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_matmul(n_rows, n_tokens, accumulate, biased):
    x, w, before = floats(n_tokens, K), floats(n_rows, K, seed=1), floats(n_tokens, n_rows, seed=2)
    bias, scale = (floats(n_rows, seed=3), np.array([0.25], np.float32)) if biased else (None, None)
    expected = x.astype(np.float64) @ w.T.astype(np.float64)
    if biased:
        expected = expected * 0.25 + bias
    if accumulate:
        expected = expected + before
    results = []
    for nth in (1, 2, 3, 5):
        out = before.copy()
        product(x, w, out, bias=bias, scale=scale, accumulate=accumulate, nth=nth)
        results.append(out)
    assert np.abs(results[0] - expected).max() <= 1e-5 * np.abs(expected).max()
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_rows_between_the_outputs_are_left_alone():
    x, w, room = floats(3, K), floats(20, K, seed=1), np.full((3, 32), 7, np.float32)
    product(x, w, room[:, :20], nth=2)
    assert (room[:, 20:] == 7).all()
    assert not (room[:, :20] == 7).any()


def test_no_tokens_is_no_work():
    out = np.full((1, 8), 7, np.float32)
    product(np.zeros((0, K), np.float32), floats(8, K), out[:0])
    assert (out == 7).all()


def test_embed_and_gather():
    table, count = floats(11, K), np.array([4], np.int64)
    tokens, index, out, picked = (
        np.array([3, 10, 0, 3], np.int32),
        np.array([2, 0], np.int32),
        np.zeros((4, K), np.float32),
        np.zeros((2, K), np.float32),
    )
    record = pack(
        embedding.EMBED_FIELDS, count=address(count), tokens=address(tokens), w=address(table), w_stride=table.strides[0], k=K,
        decode_fn=encoding_kernels("F32").decode_address, out=address(out), out_stride=out.strides[0],
    )  # fmt: skip
    run([embedding.embed], record, 3)
    assert np.array_equal(out, table[tokens])
    count[0] = 2
    record = pack(
        embedding.GATHER_FIELDS, count=address(count), index=address(index), x=address(out), x_stride=out.strides[0], width=K,
        out=address(picked),
        out_stride=picked.strides[0],
    )  # fmt: skip
    run([embedding.gather], record, 2)
    assert np.array_equal(picked, out[index])
