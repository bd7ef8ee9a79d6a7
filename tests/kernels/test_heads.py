"""Products by head against naive ones: every encoding's layout, every number of threads and any company the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.encodings import weights
from tests.kernels.paged import address, run
from tests.reference import decoders
from vllm_cpp.kernels.cpu import heads, quantize
from vllm_cpp.kernels.cpu.registry import encoding_kernels, tile_scratch_bytes
from vllm_cpp.kernels.records import pack
from vllm_cpp.quants import ENCODINGS


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def activations(x: np.ndarray, layout: str) -> np.ndarray:
    """x [rows, k] in a layout, as bytes [rows, row bytes]."""
    n, k = x.shape
    if layout == "f32":
        return x.view(np.uint8)
    out, count = np.zeros((n, quantize.activation_row_bytes(layout, k)), np.uint8), np.array([n], np.int64)
    record = pack(
        quantize.FIELDS, count=address(count), x=address(x), x_stride=x.strides[0], k=k, out=address(out), out_stride=out.strides[0],
        layout=quantize.LAYOUTS.index(layout),
    )  # fmt: skip
    run([quantize.quantize], record, 2)
    return out


def product(encoding: str, w: np.ndarray, x: np.ndarray, out: np.ndarray, *, scale: np.ndarray | None = None, nth: int = 1) -> None:
    """w bytes [heads, rows, row bytes], x f32 [tokens, heads, k], into out f32 [tokens, heads, at least rows]."""
    n, n_heads, k = x.shape
    layout, kernels = ENCODINGS[encoding].activation, encoding_kernels(encoding)
    act = activations(np.ascontiguousarray(x.reshape(-1, k)), layout).reshape(n, n_heads, -1)
    stride = heads.scratch_bytes(n, tile_scratch_bytes(k))
    scratch, count = np.full((nth, stride), 0xFF, np.uint8), np.array([n], np.int64)
    record = pack(
        heads.PRODUCT_FIELDS, count=address(count), n_heads=n_heads, k=k, n_rows=w.shape[1], act=address(act), act_stride=act.strides[0],
        act_head=act.strides[1], w=address(w), w_stride=w.strides[1], slice_bytes=w.strides[0], rows_fn=kernels.rows_address,
        tile_fn=kernels.tile_address, scale=address(scale), out=address(out), out_stride=out.strides[0], out_head=out.strides[1],
        scratch=address(scratch), scratch_stride=stride, max_count=n,
    )  # fmt: skip
    run([heads.heads_product], record, nth)


@pytest.mark.parametrize(("encoding", "k", "near"), [("F32", 24, 1e-6), ("BF16", 96, 1e-2), ("Q8_0", 96, 2e-2), ("Q4_K", 256, 2e-2)])
@pytest.mark.parametrize("n_rows", [1, 40])
@pytest.mark.parametrize("n_tokens", [1, 2, 7])
def test_agrees_with_the_naive_product(encoding, k, near, n_rows, n_tokens):
    n_heads, rng = 3, np.random.default_rng(7)
    w = weights(encoding, n_heads * n_rows, k, rng).reshape(n_heads, n_rows, -1)
    x, scale = floats(n_tokens, n_heads, k), np.array([0.5, 1.0, -2.0], np.float32)
    decoded = decoders.decode(encoding, w.reshape(-1)).reshape(n_heads, n_rows, k).astype(np.float64)
    expected = np.einsum("hrk,thk->thr", decoded, x.astype(np.float64)) * scale[:, None]
    results = []
    for nth in (1, 2, 5):
        room = np.full((n_tokens, n_heads, n_rows + 5), 7, np.float32)
        product(encoding, w, x, room, scale=scale, nth=nth)
        assert (room[..., n_rows:] == 7).all()
        results.append(room[..., :n_rows])
    size = np.sqrt((decoded**2).sum(-1).max() * (x**2).sum(-1).max())
    assert np.abs(results[0] - expected).max() <= near * size
    assert all(np.array_equal(results[0], other) for other in results[1:])
    alone = np.zeros((1, n_heads, n_rows), np.float32)
    product(encoding, w, x[-1:], alone, scale=scale)
    assert np.array_equal(alone[0], results[0][-1])


@pytest.mark.parametrize("width", [3, 16, 45])
@pytest.mark.parametrize("repeat", [1, 3])
def test_copied_rows(width, repeat):
    x, out, count = floats(5, 64), np.full((5, 80), 7, np.float32), np.array([5], np.int64)
    record = pack(
        heads.COPY_FIELDS, count=address(count), x=address(x[:, 4:]), x_stride=x.strides[0], width=width, repeat=repeat,
        out=address(out[:, 9:]), out_stride=out.strides[0],
    )  # fmt: skip
    run([heads.copy_rows], record, 3)
    expected = np.full((5, 80), 7, np.float32)
    expected[:, 9 : 9 + width] = x[np.arange(5) // repeat, 4 : 4 + width]
    assert np.array_equal(out, expected)
