"""Sampling parameters: vLLM's names and defaults, every range, every refusal by name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle

import numpy as np
import pytest

from vllm_cpp.config.sampling import SamplingParams, Structured
from vllm_cpp.errors import InvalidArgumentError, UnknownKeywordError


def test_defaults():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (1.0, 1.0, 0, 0.0, 16)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.seed, params.min_tokens, params.ignore_eos, params.stop, params.stop_token_ids) == (None, 0, False, (), ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 1.0),
        ("max_tokens", "16"),
        ("seed", -2),
        ("seed", 2**64),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("ignore_eos", 1),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", b"a"),
        ("stop_token_ids", [True]),
        ("stop", b"a"),
        ("logits_processor", 3),
        ("structured", "json"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_field(field, value):
    with pytest.raises(InvalidArgumentError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("unbounded", [None, 0, -5])
def test_max_tokens_unbounded(unbounded):
    params = SamplingParams(max_tokens=unbounded, min_tokens=1000)
    assert params.max_tokens is None
    assert params.min_tokens == 1000


def test_what_callers_write_is_stored_in_one_form():
    params = SamplingParams(stop="END", stop_token_ids=[np.int32(3)], top_k=-1, seed=-1, temperature=np.float32(0.5))
    assert (params.stop, params.stop_token_ids, params.top_k, params.seed) == (("END",), (3,), 0, None)
    assert type(params.temperature) is float
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(UnknownKeywordError, match=r"no parameter 'temprature'; did you mean 'temperature'\?") as caught:
        SamplingParams(temprature=0.5)
    assert isinstance(caught.value, TypeError)
    assert caught.value.status == 1
    with pytest.raises(InvalidArgumentError, match=r"SamplingParams takes its parameters by name \(temperature=…\), not 0.5"):
        SamplingParams(0.5)


def test_it_is_still_a_dataclass():
    params = SamplingParams(top_k=3, stop="x")
    assert dataclasses.replace(params, seed=1) == SamplingParams(top_k=3, stop=("x",), seed=1)
    assert copy.copy(params) == pickle.loads(pickle.dumps(params)) == params
    assert "top_k" in inspect.signature(SamplingParams).parameters


def test_a_structured_constraint_has_a_known_kind():
    assert SamplingParams(structured=Structured("regex", "a+")).structured.kind == "regex"
    with pytest.raises(InvalidArgumentError, match="xml"):
        Structured("xml", "<a/>")
