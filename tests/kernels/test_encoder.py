"""Norms around the mean and attention over whole texts, against the naive forms; their bits do not depend on threads or company."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.kernels.paged import address, run
from tests.reference import encoder as naive
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu import encoder
from vllm_cpp.kernels.records import pack

EPS = 1e-5


def layernorm(x, weight, bias, out, nth=1):
    count = np.array([len(x)], np.int64)
    record = pack(
        encoder.LAYERNORM_FIELDS, count=address(count), x=address(x), x_stride=x.strides[0], width=len(weight), weight=address(weight),
        bias=address(bias), eps=EPS, out=address(out), out_stride=out.strides[0],
    )  # fmt: skip
    run([encoder.layernorm], record, nth)
    return out


@pytest.mark.parametrize("width", [1, 8, 16, 40, 768])
def test_layernorm_agrees_with_the_naive_one(width):
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((7, width + 3)) + 5).astype(np.float32)
    weight, bias = rng.standard_normal((2, width)).astype(np.float32)
    rows = x[:, :width]
    out = layernorm(rows, weight, bias, np.zeros((7, width), np.float32), nth=3)
    want = naive.layernorm(rows, weight, bias, EPS)
    assert (np.abs(out - want).max(1) <= 5e-6 * np.abs(want).max(1)).all()
    assert np.array_equal(layernorm(rows, weight, bias, rows), out)  # in place


def attention(texts, n_heads, n_kv_heads, d, nth=1, seed=3):
    """Outputs of `texts` (lengths), each token's numbers drawn by the text's number alone."""
    n = sum(texts)
    q, out = np.zeros((n, n_heads, d), np.float32), np.full((n, n_heads, d), np.nan, np.float32)
    k, v = np.zeros((n, n_kv_heads, d), np.float32), np.zeros((n, n_kv_heads, d), np.float32)
    starts = np.cumsum([0, *texts]).astype(np.int32)
    for first, last in pairwise(starts):
        rng = np.random.default_rng([seed, int(last - first)])
        for array in (q, k, v):
            array[first:last] = 2 * rng.standard_normal(array[first:last].shape)
    count, scratch = np.array([len(texts)], np.int64), aligned_zeros((nth, encoder.scratch_bytes(max(texts))), np.uint8)
    record = pack(
        encoder.TEXT_ATTENTION_FIELDS, texts=address(count), starts=address(starts), q=address(q), q_stride=q.strides[0], k=address(k),
        k_stride=k.strides[0], v=address(v), v_stride=v.strides[0], n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=d, scale=d**-0.5,
        out=address(out), out_stride=out.strides[0], scratch=address(scratch), scratch_stride=scratch.strides[0],
    )  # fmt: skip
    run([encoder.text_attention], record, nth)
    want = [naive.text_attention(q[a:b], k[a:b], v[a:b], d**-0.5) for a, b in pairwise(starts)]
    return out, np.concatenate(want)


@pytest.mark.parametrize(("heads", "kv", "d"), [(4, 4, 32), (6, 2, 64), (3, 1, 40), (2, 2, 7)])
def test_attention_agrees_with_the_naive_one(heads, kv, d):
    out, want = attention([5, 1, 33, 16, 4], heads, kv, d)
    assert np.abs(out - want).max() <= 2e-6 * np.abs(want).max()


def test_a_text_has_the_same_bits_in_any_company_and_on_any_threads():
    alone, _ = attention([33], 4, 2, 24)
    for nth in (1, 2, 5):
        together, _ = attention([7, 33, 2], 4, 2, 24, nth=nth)
        assert np.array_equal(together[7:40], alone)
