"""The choice of experts equals the naive one, weights within 2e-6; the sorted pairs equal the naive ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
from tests.reference import experts, ops
from vllm_cpp.kernels.cpu import router
from vllm_cpp.kernels.records import pack

KINDS = {"softmax": router.SOFTMAX, "sigmoid": router.SIGMOID, "softmax_chosen": router.SOFTMAX_CHOSEN,
         "sqrt_softplus": router.SQRT_SOFTPLUS}  # fmt: skip


def route(
    logits, top_k, scores="softmax", bias=None, normalize=False, scale=1.0, groups=1, groups_used=1, table=None, tokens=None, sampled=None,
    nth=2,
):  # fmt: skip
    n, n_experts = logits.shape
    stride = router.scratch_bytes(n_experts)
    count, scratch = np.array([n], np.int64), np.full(stride * nth, 0xFF, np.uint8)
    ids, weights = np.zeros((n, top_k), np.int32), np.zeros((n, top_k), np.float32)
    record = pack(
        router.ROUTER_FIELDS,
        count=address(count), logits=address(logits), logits_stride=logits.strides[0], n_experts=n_experts, top_k=top_k,
        scores=KINDS[scores], bias=address(bias), groups=groups, groups_used=groups_used, table=address(table), tokens=address(tokens),
        sampled=address(sampled), normalize=normalize, scale=scale, ids=address(ids), weights=address(weights),
        scratch=address(scratch), scratch_stride=stride,
    )  # fmt: skip
    run([router.route], record, nth)
    return ids, weights


@pytest.mark.parametrize("n_experts", [7, 16, 60, 128, 512])
@pytest.mark.parametrize(
    ("scores", "steered", "normalize", "scale"),
    [
        ("softmax", False, False, 1.0),
        ("softmax", False, True, 1.0),
        ("sigmoid", True, True, 2.5),
        ("softmax_chosen", False, False, 1.0),
        ("softmax", True, True, 1.0),
        ("sqrt_softplus", False, True, 1.5),
        ("sqrt_softplus", True, False, 1.0),
    ],
)
def test_agrees_with_the_naive_router(n_experts, scores, steered, normalize, scale):
    rng = np.random.default_rng(n_experts)
    logits = (rng.standard_normal((9, n_experts)) * 3).astype(np.float32)
    bias = -np.abs(rng.standard_normal(n_experts)).astype(np.float32) if steered else None  # all scores below zero: padding must not win
    ids, weights = route(logits, 6, scores, bias, normalize, scale)
    expected_ids, expected = experts.route(logits, 6, scores, bias, normalize, scale)
    assert np.array_equal(ids, expected_ids)
    assert np.abs(weights - expected).max() <= 2e-6 * scale


@pytest.mark.parametrize(("n_experts", "groups", "used"), [(16, 4, 2), (60, 12, 3), (60, 4, 4), (256, 8, 4), (20, 20, 7), (512, 2, 1)])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "sqrt_softplus"])
def test_groups_are_chosen_by_their_two_best(n_experts, groups, used, scores):
    rng = np.random.default_rng([n_experts, groups])
    logits = (rng.standard_normal((11, n_experts)) * 2).astype(np.float32)
    bias = (rng.standard_normal(n_experts) * 0.3).astype(np.float32)
    ids, weights = route(logits, 5, scores, bias, True, 2.5, groups, used, nth=3)
    expected_ids, expected = experts.route(logits, 5, scores, bias, True, 2.5, groups, used)
    assert np.array_equal(ids, expected_ids)
    assert np.abs(weights - expected).max() <= 5e-6
    assert all(len(set(row // (n_experts // groups))) <= used for row in ids)


def test_more_experts_than_the_open_groups_have():
    logits = np.random.default_rng(8).standard_normal((3, 12)).astype(np.float32)
    ids, _ = route(logits, 9, "sigmoid", groups=4, groups_used=2)
    assert all(len(set(row)) == 9 for row in ids.tolist())
    assert np.array_equal(ids[:, :6], experts.route(logits, 6, "sigmoid", groups=4, groups_used=2)[0])


def test_ties_of_groups_go_to_the_lower_one():
    assert np.sort(route(np.zeros((1, 24), np.float32), 6, groups=4, groups_used=1)[0])[0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("through_sampled", [False, True])
def test_a_table_lists_the_experts_of_each_token(through_sampled):
    rng = np.random.default_rng(9)
    logits, table = rng.standard_normal((4, 10)).astype(np.float32), np.stack([rng.permutation(10)[:3] for _ in range(6)]).astype(np.int32)
    tokens = np.array([5, 0, 3, 3, 1, 2], np.int32)
    sampled = np.array([1, 3, 4, 5], np.int32) if through_sampled else None
    ids, weights = route(logits, 3, "sqrt_softplus", None, True, 1.5, table=table, tokens=tokens, sampled=sampled)
    listed = table[tokens[sampled]] if through_sampled else table[tokens[:4]]
    expected_ids, expected = experts.route(logits, 3, "sqrt_softplus", None, True, 1.5, listed=listed)
    assert np.array_equal(ids, expected_ids)
    assert np.abs(weights - expected).max() <= 3e-6


def test_ties_go_to_the_lower_expert():
    logits = np.zeros((1, 40), np.float32)
    logits[0, [33, 5, 21]] = 2.0
    assert route(logits, 5)[0].tolist() == [[5, 21, 33, 0, 1]]


def test_all_experts_may_be_chosen():
    logits = np.random.default_rng(1).standard_normal((2, 17)).astype(np.float32) * 200  # most probabilities are exactly zero
    assert (np.sort(route(logits, 17)[0], 1) == np.arange(17)).all()


def test_ids_stay_in_range_when_logits_are_not_numbers():
    ids, weights = route(np.full((1, 5), np.nan, np.float32), 3)
    assert sorted(ids[0].tolist()) == [0, 1, 2]
    assert np.isnan(weights).all()


def test_a_tiny_sum_is_not_divided_by():
    logits = np.full((1, 8), -30.0, np.float32)
    _, weights = route(logits, 2, "sigmoid", normalize=True)
    assert np.allclose(weights, ops.sigmoid(-30.0) / 6.103515625e-5, rtol=1e-5)


@pytest.mark.parametrize("nth", [1, 3])
def test_pairs_are_sorted_by_expert(nth):
    ids = np.random.default_rng(2).integers(0, 11, 57).astype(np.int32)
    count, offsets, pairs = np.array([57], np.int64), np.full(13, -1, np.int32), np.full(57, -1, np.int32)
    record = pack(router.GROUP_FIELDS, count=address(count), ids=address(ids), n_experts=12, offsets=address(offsets), pairs=address(pairs))
    run([router.group_by_expert], record, nth)
    expected_offsets, expected_pairs = ops.group_by_expert(ids, 12)
    assert np.array_equal(offsets, expected_offsets)
    assert np.array_equal(pairs, expected_pairs)
