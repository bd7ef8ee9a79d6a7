"""Every family against llama.cpp's recorded logits, along the recorded tokens.

F32 models agree with the recording to 1e-3 of the largest logit. Of a quantized model there are two right answers: llama.cpp's own
(activations quantized) and `exact` (activations kept float); ours stays within 1.5 times the distance between those two of the nearer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import oracle
from vllm_cpp import models
from vllm_cpp.config import offload
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.offload.resolve import REFERENCE
from vllm_cpp.gguf_file import open_model
from vllm_cpp.scheduler.batch import Chunk

BLOCK = 32


@contextmanager
def runner(
    path: Path, threads: int = 1, kv_cache_dtype: str = "f32", residency: offload.Residency | None = None
) -> Iterator[models.Runner]:
    params = EngineParams(model_path=str(path), threads=threads, block_size=BLOCK, num_blocks=16, kv_cache_dtype=kv_cache_dtype)
    with open_model(path) as model:
        loaded = models.load(model, params, residency or offload.resolve())
        try:
            yield loaded
        finally:
            loaded.close()


def logits_along(loaded: models.Runner, prompt: list[int], generated: list[int], cuts: list[int], blocks: list[int]) -> np.ndarray:
    """Logits after the prompt (fed in runs that end at `cuts`), then after each generated token but the last; float32 [len(generated),
    vocab]."""
    rows = []
    for first, last in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        out = loaded.run([Chunk(prompt[first:last], first, blocks, last == len(prompt))])
    rows.append(out[0].copy())
    for i, token in enumerate(generated[:-1]):
        rows.append(loaded.run([Chunk([token], len(prompt) + i, blocks, True)])[0].copy())
    return np.stack(rows)


def judged_rows(recording: dict) -> int:
    """How many rows to judge: all, or those before the first token at which the oracle's own two answers chose different experts. Where
    that was in the prompt: all, and the other experts' share is part of the distance."""
    if "experts" not in recording or "exact_experts" not in recording:
        return len(recording["logits"])
    differ = (recording["experts"] != recording["exact_experts"]).any(axis=(1, 2))
    first = int(differ.argmax()) if differ.any() else len(differ)
    rows = first - len(recording["prompt"]) + 1
    return min(len(recording["logits"]), rows) if rows > 0 else len(recording["logits"])


@pytest.mark.parametrize("name", oracle.used_cases())
def test_logits_agree_with_the_recording(name: str, tiny_model) -> None:
    recording = oracle.load(name)
    prompt, generated = recording["prompt"].tolist(), recording["generated"].tolist()
    with runner(tiny_model(name)) as loaded:
        rows = logits_along(loaded, prompt, generated, [], [3, 1, 2])
    if "exact" not in recording:
        assert oracle.compare(recording, rows) < 1e-3
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
        assert oracle.compare(recording, logits_along(loaded, prompt, generated, [], [3, 1, 2]), "exact") < 1e-5


@pytest.mark.parametrize(
    ("name", "kv"),
    [("llama_moe-s6-z0-mix", "f16"), ("qwen2moe-s15-z0-mix", "f16"), ("qwen3-s1-z1-F32", "f16"), ("qwen3-s1-z1-F32", "q8_0")],
)
def test_logits_are_the_same_bits_however_the_work_is_cut(name: str, kv: str, tiny_model) -> None:
    """Threads, chunks of the prompt, company in the step and KV blocks change nothing."""
    recording = oracle.load(name)
    prompt, generated = recording["prompt"].tolist(), recording["generated"].tolist()
    with runner(tiny_model(name), threads=1, kv_cache_dtype=kv) as loaded:
        alone = logits_along(loaded, prompt, generated, [], [0, 1])
    with runner(tiny_model(name), threads=3, kv_cache_dtype=kv) as loaded:
        pieces = logits_along(loaded, prompt, generated, [1, 2, 9, 20], [5, 3])
        assert np.array_equal(alone, pieces)
        others = [
            Chunk([7, 8, 9], 0, [8], True),
            Chunk(prompt, 0, [11, 12], True),
            Chunk(prompt[:5], 0, [13], False),
            Chunk([1], 0, [14], True),
        ]
        together = loaded.run(others)
        assert len(together) == 3
        assert np.array_equal(together[1], alone[0])
        step = loaded.run([Chunk([4], 3, [8], True), Chunk([generated[0]], len(prompt), [11, 12], True)])
        assert np.array_equal(step[1], alone[1])


@pytest.mark.parametrize("name", ["llama-s1-z0-F32", "qwen3-s1-z1-F32"])
def test_what_the_kv_cache_is_kept_in_costs_what_its_rounding_costs(name: str, tiny_model) -> None:
    recording = oracle.load(name)
    prompt, generated = recording["prompt"].tolist(), recording["generated"].tolist()
    apart = {}
    for dtype in ("f32", "f16", "q8_0"):
        with runner(tiny_model(name), kv_cache_dtype=dtype) as loaded:
            apart[dtype] = oracle.compare(recording, logits_along(loaded, prompt, generated, [], [3, 1, 2]))
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


def test_a_step_longer_than_one_piece(tiny_model) -> None:
    """A prompt of more tokens than fit a piece, sampled in the middle of the step, gives what two separate runs give."""
    rng = np.random.default_rng(0)
    name = "llama_moe-s6-z0-mix"
    long, short = rng.integers(0, 300, models.PIECE_TOKENS - 37).tolist(), rng.integers(0, 300, 90).tolist()
    params = EngineParams(model_path="-", threads=2, num_blocks=32)
    with open_model(tiny_model(name)) as model:
        loaded = models.load(model, params, offload.resolve())
        try:
            blocks_long, blocks_short = list(range(16)), list(range(16, 20))
            together = loaded.run([Chunk(long, 0, blocks_long, True), Chunk(short, 0, blocks_short, True)]).copy()
            assert np.array_equal(loaded.run([Chunk(long, 0, blocks_long, True)])[0], together[0])
            assert np.array_equal(loaded.run([Chunk(short, 0, blocks_short, True)])[0], together[1])
        finally:
            loaded.close()
