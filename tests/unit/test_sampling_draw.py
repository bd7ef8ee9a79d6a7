"""Filters and draws against naive ones that sort everything and follow the definitions word for word."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vllm_cpp.errors import GenerationError
from vllm_cpp.sampling import draw, penalties

# Few distinct values, so that ties are everywhere.
tied_rows = hnp.arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.0, 4.0]))


def naive_probabilities(logits, temperature, min_p=0.0, top_k=0, top_p=1.0):
    """The whole distribution in f64, one filter after another, each renormalised."""
    scaled = [(float(x) - max(map(float, logits))) / temperature for x in logits]
    kept = set(range(len(logits)))
    if min_p > 0.0:
        kept = {i for i in kept if scaled[i] >= math.log(min_p)}
    if 0 < top_k < len(kept):
        cut = sorted((scaled[i] for i in kept), reverse=True)[top_k - 1]
        kept = {i for i in kept if scaled[i] >= cut}
    weights = {i: math.exp(scaled[i]) for i in kept}
    if top_p < 1.0:
        held, nucleus = 0.0, set()
        for i in sorted(kept, key=lambda i: (-weights[i], i)):
            if held >= top_p * sum(weights.values()):
                break
            nucleus.add(i)
            held += weights[i]
        kept = nucleus
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@settings(deadline=None)
@given(tied_rows, st.integers(1, 40))
def test_top_k_keeps_the_greatest_and_what_equals_the_last_of_them(row, top_k):
    kept = draw.keep_top_k(row, min(top_k, row.size))
    cut = sorted(row.tolist(), reverse=True)[min(top_k, row.size) - 1]
    assert kept.tolist() == [i for i, value in enumerate(row) if value >= cut]


@settings(deadline=None)
@given(tied_rows, st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_that_hold_p_the_lowest_ids_of_equals(row, top_p):
    weights = np.exp(row)
    order = sorted(range(row.size), key=lambda i: (-weights[i], i))
    held = np.cumsum(weights[order], dtype=np.float64)
    count = int((held < top_p * weights.sum(dtype=np.float64)).sum()) + 1
    assert draw.keep_top_p(weights, top_p).tolist() == sorted(order[:count])


def test_top_p_of_a_flat_vocabulary():
    weights = np.ones(5000, np.float32)
    assert draw.keep_top_p(weights, 0.5).tolist() == list(range(2500))


@settings(deadline=None)
@given(tied_rows, st.floats(0.01, 1.0))
def test_min_p_is_relative_to_the_greatest(row, min_p):
    scaled = row - row.max()
    assert draw.keep_min_p(scaled, min_p).tolist() == [i for i, x in enumerate(scaled) if x >= math.log(min_p)]


@settings(deadline=None)
@given(
    tied_rows,
    st.floats(0.0, 1.0, exclude_max=True),
    st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.integers(0, 12),
    st.sampled_from([1.0, 0.9137, 0.4567, 0.0519]),  # no sum of few equal weights lies at the edge, where f32 and f64 may differ
)
def test_a_draw_falls_where_the_running_sum_of_probabilities_passes_the_uniform_number(row, uniform, temperature, min_p, top_k, top_p):
    token = draw.draw(row.copy(), uniform, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    probabilities = naive_probabilities(row, temperature, min_p, top_k, top_p)
    assert probabilities[token] > 0
    before = sum(probabilities[:token])
    assert before - 1e-5 <= uniform <= before + probabilities[token] + 1e-5


def test_the_distribution_of_many_draws():
    """Inverse transform of an even grid of uniforms: every count is exact to one, no luck involved."""
    row = np.random.default_rng(3).normal(size=50).astype(np.float32) * 2
    count = 20000
    tokens = [draw.draw(row.copy(), (i + 0.5) / count, temperature=0.8, top_k=20, top_p=0.95, min_p=0.01) for i in range(count)]
    expected = np.array(naive_probabilities(row, 0.8, 0.01, 20, 0.95)) * count
    assert np.abs(np.bincount(tokens, minlength=50) - expected).max() < 1.5


def test_a_draw_from_a_large_vocabulary_finds_every_token():
    """Several blocks and a rest, weights of zero among them: each token is found in the middle of its own share."""
    row = np.where(np.arange(1300) % 7 == 0, -np.inf, np.random.default_rng(4).normal(size=1300)).astype(np.float32)
    weights = np.exp(row.astype(np.float64))
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    for token in np.flatnonzero(weights):
        assert draw.draw(row.copy(), middles[token], temperature=1.0) == token


def test_order_of_the_filters():
    """top-p works on what top-k left: with the mass of all tokens it would keep two here."""
    row = np.log(np.array([0.3, 0.3, 0.2, 0.2], np.float32))
    kept = {draw.draw(row.copy(), u, temperature=1.0, top_k=2, top_p=0.5) for u in np.linspace(0, 0.999, 50)}
    assert kept == {0}
    kept = {draw.draw(row.copy(), u, temperature=1.0, top_p=0.5) for u in np.linspace(0, 0.999, 50)}
    assert kept == {0, 1}


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_uniform_range_fall_on_tokens_with_weight(uniform):
    row = np.array([-np.inf, 1.0, -200.0, 2.0, -np.inf], np.float32)
    assert draw.draw(row.copy(), uniform, temperature=1.0) == (1 if uniform == 0.0 else 3)
    row = np.concatenate([np.full(600, -np.inf, np.float32), row, np.full(900, -np.inf, np.float32)])
    assert draw.draw(row.copy(), uniform, temperature=1.0) == (601 if uniform == 0.0 else 603)


def test_a_block_whose_sums_disagree_in_rounding_gives_no_token_without_weight():
    """A uniform number just below the edge between two blocks, with tokens of no weight on both sides of it.

    The weights span more than f64 holds, so that the sum of a block depends on the order of the additions.
    """
    for seed in range(50):
        row = np.random.default_rng(seed).normal(size=1024, scale=12.0).astype(np.float32)
        row[400:600] = -np.inf
        weights = np.exp(row - row.max())
        edge = np.nextafter(weights[:512].sum(dtype=np.float64) / weights.sum(dtype=np.float64), 0.0)
        token = draw.draw(row.copy(), edge, temperature=1.0)
        assert token < 400 or token >= 600


def test_the_lowest_temperature_overflows_nothing():
    row = np.array([1e30, -1e30, 3e38, 0.0], np.float32)
    with np.errstate(all="raise", under="ignore", over="ignore"):
        assert draw.draw(row.copy(), 0.7, temperature=1e-5) == 2


def test_greatest_takes_the_lowest_id_of_equals():
    assert draw.greatest(np.array([0, 3, 1, 3], np.float32)) == 1
    assert draw.greatest(np.array([-np.inf, -1e30, -np.inf], np.float32)) == 1


@pytest.mark.parametrize("choose", [draw.greatest, lambda row: draw.draw(row.copy(), 0.5, temperature=1.0, top_k=2, top_p=0.5, min_p=0.1)])
@pytest.mark.parametrize(("values", "what"), [([0.0, np.nan, 9.0], "NaN"), ([-np.inf] * 3, "-inf")])
def test_rows_that_leave_no_choice_are_refused(choose, values, what):
    with pytest.raises(GenerationError, match=what):
        choose(np.array(values, np.float32))


def test_plus_infinity_forces_tokens():
    row = np.array([5.0, np.inf, 7.0, np.inf], np.float32)
    assert draw.greatest(row) == 1
    assert {draw.draw(row.copy(), u, temperature=1.0, top_k=1) for u in (0.0, 0.49, 0.51, 0.99)} == {1, 3}


@settings(deadline=None)
@given(st.lists(st.integers(0, 19), max_size=200), st.floats(0.1, 3.0), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties_against_their_definition(output, repetition, frequency, presence):
    row = np.random.default_rng(0).normal(size=20).astype(np.float32)
    expected = row.astype(np.float64)
    prompt = [1, 2, 2, 5]
    for token in range(20):
        if token in prompt or token in output:
            expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        expected[token] -= frequency * output.count(token) + presence * (token in output)
    seen, used = penalties.TokenCounts(), penalties.TokenCounts()
    for token in prompt + output:
        seen.add(token)
    for token in output:
        used.add(token)
    penalties.repeat(row, seen.ids, repetition)
    penalties.subtract(row, used.ids, used.counts, frequency, presence)
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-4)


def test_counts_grow_beyond_their_first_arrays():
    counts = penalties.TokenCounts()
    for token in [*range(1000), *range(0, 1000, 2)]:
        counts.add(token)
    assert counts.ids.tolist() == list(range(1000))
    assert counts.counts.tolist() == [2.0, 1.0] * 500
