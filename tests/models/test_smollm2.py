"""The demo's models, dense and with experts, held against what llama.cpp computes for the same files (vectors/smollm2).

The recordings say how far the oracle is from itself when nothing that matters changes; that is the measure here. Everything goes through
the Python door. A logits processor reads the rows and forces the recorded tokens, since one token chosen differently would spoil every
row after it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vllm_cpp
from benchmarks import fetch_smollm2

RECORDINGS = Path(__file__).parent.parent / "vectors" / "smollm2"
NAMES = sorted(path.stem for path in RECORDINGS.glob("*.npz"))
LANES = ("kv_f16", "two_threads", "flash", "one_by_one", "exact")
SLACK = 1.5  # how much further than the oracle's own lanes an engine may be


@cache
def recording(name: str) -> dict[str, Any]:
    with np.load(RECORDINGS / f"{name}.npz") as arrays:
        return {**arrays, "meta": json.loads(str(arrays["meta"]))}


@dataclass(frozen=True)
class Models:
    """Both models, loaded once, and their walks along the recordings."""

    paths: dict[str, Path]
    llms: dict[str, vllm_cpp.LLM]
    walks: dict[str, np.ndarray]

    def walk(self, name: str) -> np.ndarray:
        """Logits [32, vocab] along a recording's tokens."""
        if name not in self.walks:
            self.walks[name] = walk(self.of(name), recording(name))
        return self.walks[name]

    def of(self, name: str) -> vllm_cpp.LLM:
        return self.llms[name.partition("-")[0]]


def walk(llm: vllm_cpp.LLM, recorded: dict[str, Any]) -> np.ndarray:
    rows: list[np.ndarray] = []

    def force(_: list[int], logits: np.ndarray) -> None:
        rows.append(logits.copy())
        logits[:] = -np.inf
        logits[recorded["generated"][len(rows) - 1]] = 0.0

    steps = len(recorded["generated"])
    completion = llm.generate(recorded["prompt"].tolist(), max_tokens=steps, temperature=0, ignore_eos=True, logits_processor=force)
    assert completion.token_ids == recorded["generated"].tolist()
    return np.stack(rows)


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    paths = {"dense": fetch_smollm2.dense(), "moe": fetch_smollm2.moe()}
    with vllm_cpp.load(paths["dense"]) as dense, vllm_cpp.load(paths["moe"]) as moe:
        yield Models(paths, {"dense": dense, "moe": moe}, {})


def rms(a: np.ndarray) -> float:
    return float(np.sqrt((a**2).mean()))


def noise(recorded: dict[str, Any], measure: str) -> float:
    """The most that any lane of the oracle differs from its base."""
    return max(recorded["meta"][lane][measure] for lane in LANES)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_file_is_the_recorded_one(models: Models, kind: str) -> None:
    with models.paths[kind].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == recording(f"{kind}-capital")["meta"]["model_sha256"], f"{models.paths[kind]} is stale: delete it, it is made again"


@pytest.mark.parametrize("name", NAMES)
def test_prompts_become_the_oracles_tokens(models: Models, name: str) -> None:
    recorded = recording(name)
    ids = models.of(name).tokenize(recorded["meta"]["text"], add_special=True, parse_special=True)
    assert ids == recorded["prompt"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_as_near_as_the_oracle_is_to_itself(models: Models, name: str) -> None:
    recorded = recording(name)
    apart = np.take_along_axis(models.walk(name), recorded["ids"].astype(np.int64), 1) - recorded["logits"]
    assert rms(apart) <= SLACK * noise(recorded, "rms")
    assert np.abs(apart).max() <= SLACK * noise(recorded, "largest")
    if "full_row" in recorded:
        apart = models.walk(name)[0] - recorded["full_row"].astype(np.float32)
        assert apart.std() <= SLACK * noise(recorded, "first_row")


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_over_all_prompts_logits_are_as_near_as_float_activations(models: Models, kind: str) -> None:
    ours, exact = [], []
    for name in (name for name in NAMES if name.startswith(kind)):
        recorded = recording(name)
        ours.append(np.take_along_axis(models.walk(name), recorded["ids"].astype(np.int64), 1) - recorded["logits"])
        exact.append(recorded["exact"] - recorded["logits"])
    assert rms(np.stack(ours)) <= SLACK * rms(np.stack(exact))


@pytest.mark.parametrize("name", NAMES)
def test_every_clear_choice_is_the_oracles(models: Models, name: str) -> None:
    recorded = recording(name)
    clear = recorded["margin"] > noise(recorded, "margin_moved")
    assert clear.sum() >= 14
    assert (models.walk(name).argmax(1)[clear] == recorded["generated"][clear]).all()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_oracles_until_a_choice_is_unclear(models: Models, name: str) -> None:
    recorded = recording(name)
    unclear = np.flatnonzero(recorded["margin"] <= noise(recorded, "margin_moved"))
    steps = int(unclear[0]) if len(unclear) else len(recorded["generated"])
    completion = models.of(name).generate(recorded["prompt"].tolist(), max_tokens=32, temperature=0, ignore_eos=True)
    assert completion.token_ids[:steps] == recorded["generated"][:steps].tolist()


def test_some_recordings_are_clear_for_all_32_tokens() -> None:
    clear = [name for name in NAMES if (recording(name)["margin"] > noise(recording(name), "margin_moved")).all()]
    assert {"dense-numbers", "moe-numbers"} <= set(clear)


def test_a_q8_0_kv_cache_is_as_near_as_an_f16_one(models: Models) -> None:
    with vllm_cpp.load(models.paths["dense"], kv_cache_dtype="q8_0") as llm:
        for name in ("dense-chat", "dense-numbers"):
            recorded = recording(name)
            apart = np.take_along_axis(walk(llm, recorded), recorded["ids"].astype(np.int64), 1) - recorded["logits"]
            assert rms(apart) <= SLACK * noise(recorded, "rms")


def test_the_reference_lane_is_the_exact_answer(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VT_CPU_REF", "1")
    with vllm_cpp.load(models.paths["dense"]) as llm:
        assert "weights expanded to float32" in repr(llm)
        for name in ("dense-capital", "dense-umlauts"):
            recorded = recording(name)
            apart = np.take_along_axis(walk(llm, recorded), recorded["ids"].astype(np.int64), 1) - recorded["exact"]
            assert np.abs(apart).max() <= 1e-3 < recorded["meta"]["exact"]["largest"] / 10


def test_rows_do_not_depend_on_the_number_of_threads(models: Models) -> None:
    with vllm_cpp.load(models.paths["moe"], threads=1) as one, vllm_cpp.load(models.paths["moe"], threads=3) as three:
        for llm in (one, three):
            assert (walk(llm, recording("moe-capital")) == models.walk("moe-capital")).all()
