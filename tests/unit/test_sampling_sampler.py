"""The sampler of one request: the order of the edits, seeds, end tokens, the caller's processor."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_cpp.config.sampling import SamplingParams
from vllm_cpp.errors import GenerationError
from vllm_cpp.sampling import Sampler

ENDS = frozenset({8, 9})


def sampler(prompt=(), **keywords):
    return Sampler(SamplingParams(**keywords), list(prompt), ENDS, vocab_size=10)


def rows(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 10)).astype(np.float32)


def choices(one, count, seed=0):
    return [one.choose(row) for row in rows(count, seed)]


def test_a_seed_repeats_and_another_differs():
    first = choices(sampler(seed=7), 50)
    assert choices(sampler(seed=7), 50) == first
    assert choices(sampler(seed=8), 50) != first
    assert choices(sampler(), 50) != choices(sampler(), 50)


def test_a_seed_draws_the_documented_numbers():
    uniforms = np.random.Generator(np.random.Philox(key=7)).random(50)
    expected = []
    for row, uniform in zip(rows(50), uniforms, strict=True):
        weights = np.exp(row.astype(np.float64))
        expected.append(int(np.searchsorted(np.cumsum(weights), uniform * weights.sum(), side="right")))
    assert choices(sampler(seed=7), 50) == expected


def test_a_seed_may_use_all_its_bits():
    assert choices(sampler(seed=2**64 - 1), 50) != choices(sampler(seed=2**63 - 1), 50)


def test_greedy_is_the_argmax_and_needs_no_seed():
    for temperature in (0.0, -1.0, 1e-6):
        assert choices(sampler(temperature=temperature), 20) == rows(20).argmax(axis=1).tolist()


def test_end_tokens_wait_for_min_tokens():
    one = sampler(temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    row = np.arange(10, dtype=np.float32)
    assert [one.choose(row.copy()) for _ in range(4)] == [6, 6, 9, 9]
    assert one.end_ids == {7, 8, 9}


def test_ignored_end_tokens_are_ordinary_but_stop_tokens_are_not():
    one = sampler(temperature=0.0, min_tokens=1, stop_token_ids=(9,), ignore_eos=True)
    assert one.end_ids == {9}
    assert one.choose(np.arange(10, dtype=np.float32)) == 8


def test_a_stop_token_beyond_the_vocabulary_masks_nothing():
    one = sampler(temperature=0.0, min_tokens=1, stop_token_ids=(10_000,))
    assert one.choose(np.arange(10, dtype=np.float32)) == 7


def test_repetition_looks_at_the_prompt_and_the_output():
    row = np.array([0, 0, 5, 4.5, 4, 0, 0, 0, 0, 0], np.float32)
    one = sampler(prompt=[2], temperature=0.0, repetition_penalty=2.0)
    assert [one.choose(row.copy()) for _ in range(3)] == [3, 4, 2]


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_look_at_the_output_only(penalty):
    row = np.array([0, 0, 5, 4.5, 4, 0, 0, 0, 0, 0], np.float32)
    one = sampler(prompt=[2], temperature=0.0, **{penalty: 0.6})
    assert [one.choose(row.copy()) for _ in range(5)] == ([2, 3, 2, 2, 2] if penalty == "presence_penalty" else [2, 3, 2, 4, 3])


def test_the_processor_sees_the_output_and_edits_the_row_before_everything_else():
    seen = []

    def force(token_ids, logits):
        seen.append((list(token_ids), logits.dtype, logits.shape))
        token_ids.append(99)  # a copy: the caller cannot break the request with it
        logits[:] = -1e30
        logits[3] = 1.0
        logits[4] = 0.9

    one = sampler(prompt=[1, 2], temperature=0.0, presence_penalty=0.5, logits_processor=force)
    assert [one.choose(row) for row in rows(3)] == [3, 4, 3]
    assert seen == [(ids, np.dtype(np.float32), (10,)) for ids in ([], [3], [3, 4])]


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit("boom")])
def test_what_a_processor_raises_is_a_generation_error(error):
    def fail(token_ids, logits):
        raise error

    with pytest.raises(GenerationError, match=rf"logits processor raised {type(error).__name__}: boom") as caught:
        sampler(logits_processor=fail).choose(rows(1)[0])
    assert caught.value.__cause__ is error


def test_min_tokens_holds_against_a_processor_too():
    def force_end(token_ids, logits):
        logits[9] = np.inf

    assert sampler(temperature=0.0, min_tokens=1, logits_processor=force_end).choose(np.arange(10, dtype=np.float32)) == 7
