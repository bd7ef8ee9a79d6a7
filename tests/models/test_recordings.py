"""Every family against llama.cpp's recorded logits, along the recorded tokens.

F32 models agree with the recording to 1e-5 of the largest logit, at every position of a short prompt. Of a quantized model there are two
right answers: llama.cpp's own (activations quantized) and `exact` (activations kept float); ours stays within 1.5 times the distance
between those two of the nearer one.
"""

from __future__ import annotations

import numpy as np
import pytest

import oracle
from models.driving import blocks_for, logits_along, runner
from tiny_models import FAMILIES
from vllm_cpp import models
from vllm_cpp.config import offload
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.offload.resolve import REFERENCE
from vllm_cpp.gguf_file import open_model
from vllm_cpp.scheduler.batch import Chunk

# llama.cpp looks gelu up in a table of half precision, weights decoded or not: that alone moves logits by so much.
HALF_GELU = {"gemma4": 1e-3}


def float_tolerance(recording: dict, family: str) -> float:
    """How far two answers with float activations may be apart: each adds in its own order. Far from the start there is the angle of rope
    besides, which llama.cpp multiplies up in float32."""
    far = len(recording["prompt"]) > 200
    return HALF_GELU.get(family, 3e-5 if far else 1e-5)


def judged_rows(recording: dict) -> int:
    """How many rows to judge: all, or those before the first token at which the oracle's own two answers chose different experts. Where
    that was in the prompt: all, and the other experts' share is part of the distance."""
    if "experts" not in recording or "exact_experts" not in recording:
        return len(recording["logits"])
    differ = (recording["experts"] != recording["exact_experts"]).any(axis=(1, 2))
    first = int(differ.argmax()) if differ.any() else len(differ)
    rows = first - len(recording["prompt"]) + 1
    return min(len(recording["logits"]), rows) if rows > 0 else len(recording["logits"])


def test_every_recorded_family_is_run() -> None:
    assert oracle.used_cases() == list(oracle.cases())
    assert oracle.families() == sorted(FAMILIES)


@pytest.mark.parametrize("name", oracle.used_cases())
def test_logits_agree_with_the_recording(name: str, tiny_model) -> None:
    recording = oracle.load(name)
    prompt, generated = recording["prompt"].tolist(), recording["generated"].tolist()
    with runner(tiny_model(name)) as loaded:
        rows = logits_along(loaded, prompt, generated)
        if "exact" not in recording:
            tolerance = float_tolerance(recording, oracle.cases()[name].family)
            assert oracle.compare(recording, rows) < tolerance
        if "prompt_logits" in recording:
            blocks = blocks_for(len(prompt), seed=1)
            rows = [loaded.run([Chunk([token], i, blocks, True)])[0].copy() for i, token in enumerate(prompt)]
            assert oracle.compare(recording, np.stack(rows), "prompt_logits") < tolerance
    if "exact" not in recording:
        return
    n = judged_rows(recording)
    largest = np.abs(recording["logits"][:n]).max()
    noise = np.abs(recording["logits"][:n] - recording["exact"][:n]).max() / largest
    ours = min(np.abs(rows[:n] - recording[key][:n]).max() / largest for key in ("logits", "exact"))
    assert ours <= 1.5 * noise


@pytest.mark.parametrize("name", [name for name in oracle.used_cases() if "exact" in oracle.load(name)])
def test_the_reference_lane_is_the_exact_answer(name: str, tiny_model) -> None:
    """Weights expanded to float32, keys and values too, activations as they are: what the oracle gives for decoded weights."""
    recording = oracle.load(name)
    prompt, generated = recording["prompt"].tolist(), recording["generated"].tolist()
    with runner(tiny_model(name), kv_cache_dtype="f16", residency=offload.Residency(expand=REFERENCE)) as loaded:
        apart = oracle.compare(recording, logits_along(loaded, prompt, generated), "exact")
    assert apart < float_tolerance(recording, oracle.cases()[name].family)


@pytest.mark.parametrize("name", ["llama-s1-z0-F32", "qwen3-s1-z1-F32"])
def test_what_the_kv_cache_is_kept_in_costs_what_its_rounding_costs(name: str, tiny_model) -> None:
    recording = oracle.load(name)
    prompt, generated = recording["prompt"].tolist(), recording["generated"].tolist()
    apart = {}
    for dtype in ("f32", "f16", "q8_0"):
        with runner(tiny_model(name), kv_cache_dtype=dtype) as loaded:
            apart[dtype] = oracle.compare(recording, logits_along(loaded, prompt, generated))
    assert apart["f32"] < 1e-5
    assert 1e-4 < apart["f16"] < 2e-3
    assert 5e-3 < apart["q8_0"] < 4e-2


def test_a_q8_0_cache_holds_nearly_twice_the_tokens(tiny_model) -> None:
    with open_model(tiny_model("qwen3-s1-z1-F32")) as model:
        blocks = {}
        for dtype in ("f16", "q8_0"):
            params = EngineParams(model_path="-", threads=1, kv_cache_memory_bytes=1 << 20, kv_cache_dtype=dtype)
            loaded = models.load(model, params, offload.resolve())
            blocks[dtype] = loaded.num_blocks
            loaded.close()
    assert 1.7 < blocks["q8_0"] / blocks["f16"] < 2
