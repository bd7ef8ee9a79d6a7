"""Streamed experts against resident ones: the same bits for every number of slots, and every way streaming speaks or refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from vllm_cpp import models
from vllm_cpp.config import offload
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.offload.install import reset as reset_documents
from vllm_cpp.gguf_file import open_model
from vllm_cpp.residency import streaming
from vllm_cpp.scheduler.batch import Chunk

MODEL = "qwen2moe-s15-z0-mix"
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 300, 37)]


@pytest.fixture(autouse=True)
def _a_process_of_its_own() -> Iterator[None]:
    reset_documents()
    yield
    streaming.forget_store()
    reset_documents()


@contextmanager
def runner(path: Path, *, slots: int | None, threads: int = 1, **more: object) -> Iterator[models.Runner]:
    stream = {} if slots is None else {"expert_stream": {"enabled": True, "slots": slots, **more}}
    residency = offload.install(offload.parse({"vllm_cpp": stream}))
    with open_model(path) as model:
        loaded = models.load(model, EngineParams(model_path=str(path), threads=threads, num_blocks=16), residency)
        try:
            yield loaded
        finally:
            loaded.close()


def logits(loaded: models.Runner) -> np.ndarray:
    """Of a prompt in two chunks, of another sequence beside it, and of some decoded tokens."""
    rows = [loaded.run([Chunk(PROMPT[:30], 0, [0, 1], False), Chunk(PROMPT[:3], 0, [5], True)]).copy()]
    rows.append(loaded.run([Chunk(PROMPT[30:], 30, [0, 1], True)]).copy())
    for i in range(6):
        rows.append(loaded.run([Chunk([PROMPT[i]], len(PROMPT) + i, [0, 1], True), Chunk([PROMPT[i + 7]], 3 + i, [5], True)]).copy())
    return np.concatenate(rows)


def slice_count(path: Path) -> int:
    with open_model(path) as model:
        return sum(info.shape[0] for towers in streaming.expert_layers(model) for info in towers)


def test_streamed_is_resident_bit_for_bit_with_any_number_of_slots(tiny_model) -> None:
    path = tiny_model(MODEL)
    with runner(path, slots=None) as loaded:
        resident = logits(loaded)
    assert np.isfinite(resident).all()
    total = slice_count(path)
    with open_model(path) as model:
        encodings = {info.encoding.name for towers in streaming.expert_layers(model) for info in towers}
        assert len({info.slice_bytes for towers in streaming.expert_layers(model) for info in towers}) > 1
    assert len(encodings) > 1
    for slots in range(1, total + 2):
        with runner(path, slots=slots, threads=1 + slots % 3) as loaded:
            assert np.array_equal(logits(loaded), resident), f"{slots} slots"
            stats = loaded.stats()["expert_stream"]
        assert stats["hits"] + stats["misses"] > 0
        assert stats["fills"] == stats["misses"] - stats["exhausted"]
        assert (stats["exhausted"] == 0) == (slots >= 3)
        streaming.forget_store()
        reset_documents()
