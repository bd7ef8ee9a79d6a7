"""Routed experts against naive ones: every activation, biases and scales, towers in one piece, any number of threads with the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
from tests.kernels.test_matmul import floats
from tests.reference import experts as naive
from tests.reference import ops
from vllm_cpp.kernels.cpu import elementwise, moe
from vllm_cpp.kernels.cpu.registry import encoding_kernels, tile_scratch_bytes
from vllm_cpp.kernels.records import pack

KINDS = {"silu": elementwise.SILU, "gelu": elementwise.GELU, "squared relu": elementwise.SQUARED_RELU,
         "shifted silu": elementwise.SHIFTED_SILU, "silu, then cut": elementwise.SILU_THEN_CUT,
         "cut, then silu": elementwise.CUT_THEN_SILU, "gelu alone": elementwise.GELU_ALONE}  # fmt: skip
N_EXPERTS, TOP_K, K, HIDDEN = 7, 3, 96, 50


def projection(tower: np.ndarray, whole: np.ndarray | None = None, places: np.ndarray | None = None) -> np.ndarray:
    """The record of a tower, or of the rows of a larger one that it is a view of."""
    base = tower if whole is None else whole
    return pack(
        moe.TOWER_FIELDS, base=address(tower), slice_bytes=base.strides[0], places=address(places), offset=address(tower) - address(base)
    )


def experts(
    x, gate, up, down, ids, weights, *, activation="silu", limit=np.inf, scales=(None,) * 3, biases=(None,) * 3, whole=None,
    accumulate=True, elsewhere=False, nth=1,
):  # fmt: skip
    """The three operations, from activations to the sum added to a copy of x (or, not accumulated, written over it). `whole`: the tower
    that gate and up are the rows of. `elsewhere`: slices are found through tables of places."""
    n, top_k = ids.shape
    n_experts, hidden, k = up.shape
    kernels, n_pairs, tile_bytes = encoding_kernels("F32"), n * top_k, tile_scratch_bytes(max(k, hidden))
    offsets, pairs = ops.group_by_expert(ids.reshape(-1), n_experts)
    offsets, pairs = np.asarray(offsets, np.int32), np.asarray(pairs, np.int32)
    count, stride = np.array([n], np.int64), moe.scratch_bytes(n_pairs, tile_bytes)
    scratch = np.full(stride * nth, 0xFF, np.uint8)
    gate_out, up_out, y = (np.full((n_pairs, width), np.nan, np.float32) for width in (hidden, hidden, down.shape[1]))
    tables = {}
    for tower in (gate, up, down):
        base = tower if whole is None or tower is down else whole
        if elsewhere and tower is not None:
            tables[id(tower)] = np.array([[address(base) + e * base.strides[0], 0] for e in range(n_experts)], np.int64)
    up_tower = projection(up, whole, tables.get(id(up)))
    gate_tower = up_tower if gate is None else projection(gate, whole, tables.get(id(gate)))
    down_tower = projection(down, None, tables.get(id(down)))
    fn = {"rows_fn": kernels.rows_address, "tile_fn": kernels.tile_address}
    shared = {"n_experts": n_experts, "offsets": address(offsets), "pairs": address(pairs), "scratch": address(scratch),
              "scratch_stride": stride, "max_count": n_pairs, **dict.fromkeys(moe.WAVE_FIELDS, 0)}  # fmt: skip
    bias_stride = next((bias.strides[0] for bias in biases[:2] if bias is not None), 0)
    record = pack(
        moe.UP_FIELDS, **shared, top_k=top_k, kind=KINDS[activation], limit=float(limit), act=address(x), act_stride=x.strides[0],
        up_act=address(x), up_act_stride=x.strides[0],
        gate_tower=address(gate_tower), gate_stride=up.strides[1], gate_rows_fn=fn["rows_fn"], gate_tile_fn=fn["tile_fn"],
        gate_scale=address(scales[0]), gate_bias=address(biases[0]), up_tower=address(up_tower), up_stride=up.strides[1],
        up_rows_fn=fn["rows_fn"], up_tile_fn=fn["tile_fn"], up_scale=address(scales[1]), up_bias=address(biases[1]),
        bias_stride=bias_stride, k=k, n_rows=hidden, gate_out=address(gate_out), up_out=address(up_out), out_stride=gate_out.strides[0],
    )  # fmt: skip
    run([moe.experts_up], record, nth)
    record = pack(
        moe.DOWN_FIELDS, **shared, act=address(gate_out), act_stride=gate_out.strides[0], tower=address(down_tower), stride=down.strides[1],
        **fn, scale=address(scales[2]), bias=address(biases[2]), k=hidden, n_rows=down.shape[1], out=address(y), out_stride=y.strides[0],
    )  # fmt: skip
    run([moe.experts_down], record, nth)
    out = x.copy() if accumulate else np.full((n, down.shape[1]), np.nan, np.float32)
    record = pack(
        moe.COMBINE_FIELDS, count=address(count), top_k=top_k, width=out.shape[1], weights=address(weights), y=address(y),
        y_stride=y.strides[0], x=address(out), x_stride=out.strides[0], accumulate=accumulate,
    )  # fmt: skip
    run([moe.combine], record, nth)
    return out


def chosen(n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(N_EXPERTS)[:TOP_K] for _ in range(n_tokens)]).astype(np.int32)
    return ids, rng.random((n_tokens, TOP_K)).astype(np.float32)


def towers(width: int = K) -> tuple[np.ndarray, ...]:
    return tuple(floats(N_EXPERTS, *shape, seed=seed) for seed, shape in enumerate([(HIDDEN, width), (HIDDEN, width), (width, HIDDEN)], 1))


def agree(results: list[np.ndarray], expected: np.ndarray) -> None:
    assert np.abs(results[0] - expected).max() <= 1e-5 * np.abs(expected).max()
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("n_tokens", [1, 6])
@pytest.mark.parametrize("scaled", ["", "gate", "up", "down", "gate up down"])
@pytest.mark.parametrize("biased", [False, True])
def test_scales_and_biases(n_tokens, scaled, biased):
    x, (gate, up, down), (ids, weights) = floats(n_tokens, K), towers(), chosen(n_tokens)
    factors = {part: np.linspace(low, 2, N_EXPERTS, dtype=np.float32) for part, low in (("gate", 0.1), ("up", 0.3), ("down", 0.5))}
    scales = tuple(factors[part] if part in scaled else None for part in factors)
    biases = (floats(N_EXPERTS, HIDDEN, seed=7), floats(N_EXPERTS, HIDDEN, seed=8), floats(N_EXPERTS, K, seed=9)) if biased else (None,) * 3
    more = {"scales": scales, "biases": biases}
    expected = x + naive.experts(x, gate, up, down, ids, weights, **more)
    agree([experts(x, gate, up, down, ids, weights, **more, nth=nth) for nth in (1, 2, 3, 5)], expected)


@pytest.mark.parametrize("n_tokens", [1, 6])
@pytest.mark.parametrize("activation", list(KINDS))
@pytest.mark.parametrize("limit", [np.inf, 4.0])
def test_activations(n_tokens, activation, limit):
    x, (gate, up, down), (ids, weights) = floats(n_tokens, K), towers(), chosen(n_tokens)
    gate = None if activation == "squared relu" else gate
    expected = x + naive.experts(x, gate, up, down, ids, weights, activation, limit)
    agree([experts(x, gate, up, down, ids, weights, activation=activation, limit=limit, nth=nth) for nth in (1, 2, 3)], expected)


@pytest.mark.parametrize("n_tokens", [1, 6])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_gate_and_up_in_one_tower(n_tokens, elsewhere):
    """The same bits as from two towers, with biases in one table too, and where slices have to be looked up."""
    x, (gate, up, down), (ids, weights) = floats(n_tokens, K), towers(), chosen(n_tokens)
    both = np.ascontiguousarray(np.concatenate([gate, up], 1))
    bias = floats(N_EXPERTS, 2 * HIDDEN, seed=7)
    split = np.ascontiguousarray(bias[:, :HIDDEN]), np.ascontiguousarray(bias[:, HIDDEN:]), None
    separate = experts(x, gate, up, down, ids, weights, biases=split, elsewhere=elsewhere)
    assert np.array_equal(separate, experts(x, gate, up, down, ids, weights, biases=split))
    parts = both[:, :HIDDEN], both[:, HIDDEN:]
    biases = bias[:, :HIDDEN], bias[:, HIDDEN:], None
    whole = experts(x, *parts, down, ids, weights, biases=biases, whole=both, elsewhere=elsewhere, nth=2)
    assert np.array_equal(whole, separate)


def test_experts_of_another_width_write_a_sum_of_their_own():
    """Nothing is read from where the sum goes."""
    x, (_, up, down), (ids, weights) = floats(6, 64), towers(64), chosen(6)
    expected = naive.experts(x, None, up, down, ids, weights, "squared relu")
    sums = [experts(x, None, up, down, ids, weights, activation="squared relu", accumulate=False, nth=nth) for nth in (1, 3)]
    agree(sums, expected)
