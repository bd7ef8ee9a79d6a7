"""Recurrent state through the whole engine: requests that come and go, are put back, or end in the middle of their prompt leave nothing
behind. Every request gets the logits of a lone run, bit for bit, at every one of its tokens."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict

import numpy as np
import pytest

from fakes import FakeTokenizer
from vllm_cpp import models
from vllm_cpp.config import offload
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.sampling import SamplingParams
from vllm_cpp.core import Engine
from vllm_cpp.gguf_file import open_model

PATIENCE_S = 60.0
# Mamba-2 with latent experts of several widths, Mamba, a convolution alone; all with attention in some layers.
CASES = ("nemotron_h_moe-puzzle-s1-z0-F32", "jamba-s1-z0-F32", "lfm2moe-s1-z0-F32")
LENGTHS = [(5, 9), (61, 4), (1, 30), (40, 12), (17, 1), (33, 20), (2, 8), (64, 6)]  # tokens of prompt and of answer


class Watched:
    """A runner that keeps the place, first position and length of every chunk, and can be held before a step."""

    def __init__(self, runner):
        self._runner = runner
        self.steps = []
        self.held_from = None  # the number of the step to hold
        self.arrived, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def run(self, chunks):
        if len(self.steps) == self.held_from:
            self.arrived.set()
            assert self.go_on.wait(PATIENCE_S)
        self.steps.append([(chunk.state_id, chunk.start, len(chunk.token_ids)) for chunk in chunks])
        return self._runner.run(chunks)


@pytest.fixture
def engine_of(tiny_model):
    """Engines over a recorded case's model; closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def build(name, **keywords):
            keywords = {"threads": 2, "block_size": 16, "num_blocks": 64, "max_num_seqs": 4, **keywords}
            params = EngineParams(model_path=str(tiny_model(name)), **keywords)
            model = stack.enter_context(open_model(params.model_path))
            runner = Watched(models.load(model, params, offload.resolve()))
            return stack.enter_context(Engine(runner, FakeTokenizer(), params)), runner

        yield build


class Answer:
    """A greedy request that keeps the logits its tokens were chosen from."""

    def __init__(self, engine, prompt, max_tokens):
        self.rows = []
        keep = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logits_processor=lambda _, logits: self.rows.append(logits.copy())
        )
        self.request = engine.submit(prompt, keep)

    def wait(self):
        completion = self.request.wait(PATIENCE_S)
        return completion.token_ids, np.array(self.rows)


def prompts(lengths=LENGTHS, seed=4):
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 290, n).tolist(), answer) for n, answer in lengths]


def alone(engine_of, name, requests):
    engine, _ = engine_of(name, max_num_seqs=1, threads=1)
    return [Answer(engine, *request).wait() for request in requests]


def assert_same(answers, expected):
    for (tokens, rows), (expected_tokens, expected_rows) in zip(answers, expected, strict=True):
        assert tokens == expected_tokens
        assert np.array_equal(rows, expected_rows)


@pytest.mark.parametrize("name", CASES)
def test_requests_that_come_and_go_and_take_over_places(name, engine_of):
    requests = prompts()
    engine, runner = engine_of(name, max_num_seqs=3, max_num_batched_tokens=23)
    answers = [Answer(engine, *request) for request in requests]
    assert_same([answer.wait() for answer in answers], alone(engine_of, name, requests))
    begun = defaultdict(int)
    for step in runner.steps:
        places = [place for place, _, _ in step]
        assert len(set(places)) == len(places)
        for place, start, _ in step:
            begun[place] += start == 0
    assert set(begun) <= {0, 1, 2}
    assert sum(begun.values()) == len(requests)  # so every place was begun anew by several


@pytest.mark.parametrize("name", CASES)
def test_a_sequence_that_was_put_back_is_computed_again_from_its_start(name, engine_of):
    requests = prompts([(30, 30), (31, 30), (29, 30), (20, 30)])
    engine, _ = engine_of(name, num_blocks=9)
    answers = [Answer(engine, *request) for request in requests]
    assert_same([answer.wait() for answer in answers], alone(engine_of, name, requests))
    assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("name", CASES)
def test_an_abort_in_the_middle_of_a_prompt(name, engine_of):
    """The next request gets the place of one whose prompt was half read."""
    long, short = prompts([(60, 5), (19, 7)])
    engine, runner = engine_of(name, max_num_seqs=1, max_num_batched_tokens=16)
    runner.held_from = 2
    aborted = Answer(engine, *long)
    assert runner.arrived.wait(PATIENCE_S)
    aborted.request.cancel()
    next_one = Answer(engine, *short)
    runner.go_on.set()
    assert aborted.request.wait(PATIENCE_S).finish_reason == "abort"
    assert not aborted.rows
    assert_same([next_one.wait()], alone(engine_of, name, [short]))
    assert [(place, start) for step in runner.steps[:4] for place, start, _ in step] == [(0, 0), (0, 16), (0, 32), (0, 0)]


@pytest.mark.parametrize("asked", [True, None])
def test_prefix_caching_is_off_and_said_so_when_asked_for(asked, engine_of, capfd):
    name = CASES[0]
    ((prompt, count),) = prompts([(60, 3)])
    engine, runner = engine_of(name, enable_prefix_caching=asked)
    said = capfd.readouterr().err
    assert ("enable_prefix_caching=True has no effect: this model has recurrent layers" in said) == bool(asked)
    answers = [Answer(engine, prompt, count).wait() for _ in range(3)]
    assert_same(answers, [answers[0]] * 3)
    stats = engine.stats()
    assert (stats["kv_blocks_cached"], stats["prefix_cache_hit_tokens"]) == (0, 0)
    assert [step for step in runner.steps if step[0][1] == 0] == [[(0, 0, 60)]] * 3
