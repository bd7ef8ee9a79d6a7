"""Streamed is resident, bit for bit, for every family with routed experts: from one slot, which holds no expert whole, to all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import oracle
from models.driving import blocks_for, runner
from tiny_models import outline
from vllm_cpp import log
from vllm_cpp.config import offload
from vllm_cpp.config.offload.install import reset as reset_documents
from vllm_cpp.gguf_file import open_model
from vllm_cpp.models import Runner
from vllm_cpp.residency import inventory, streaming
from vllm_cpp.scheduler.batch import Chunk


@pytest.fixture(autouse=True)
def _a_process_of_its_own() -> Iterator[None]:
    reset_documents()
    log.forget()
    yield
    streaming.forget_store()
    reset_documents()


def with_experts() -> list[str]:
    families = [family for family in oracle.families() if any("_exps.weight" in tensor for tensor in outline(family).tensors)]
    return [oracle.case_of(family, size) for family in families for size in oracle.sizes_of(family)]


def logits(loaded: Runner, prompt: list[int]) -> np.ndarray:
    """Of a prompt in two chunks with a stranger beside each, and of two sequences that are decoded together."""
    n = len(prompt)
    ours, other = blocks_for(n + 3, 0, range(8)), blocks_for(n + 3, 1, range(8, 16))
    rows = [loaded.run([Chunk(prompt[:5], 0, other, True, 1), Chunk(prompt[: n - 4], 0, ours, False, 0)]).copy()]
    rows.append(loaded.run([Chunk(prompt[n - 4 :], n - 4, ours, True, 0), Chunk(prompt[3:4], 5, other, True, 1)]).copy())
    for i in range(2):
        rows.append(loaded.run([Chunk([prompt[i]], n + i, ours, True, 0), Chunk([prompt[i + 1]], 6 + i, other, True, 1)]).copy())
    return np.concatenate(rows)


def streamed(path: Path, prompt: list[int], slots: int, threads: int) -> tuple[np.ndarray, dict[str, int]]:
    document = {"vllm_cpp": {"expert_stream": {"enabled": True, "slots": slots}}}
    try:
        with runner(path, threads=threads, residency=offload.install(offload.parse(document))) as loaded:
            return logits(loaded, prompt), loaded.stats()["expert_stream"]
    finally:
        streaming.forget_store()
        reset_documents()


@pytest.mark.parametrize("name", with_experts())
def test_streamed_is_resident_bit_for_bit(name: str, tiny_model) -> None:
    path, prompt = tiny_model(name), oracle.load(name)["prompt"].tolist()
    with runner(path) as loaded:
        resident = logits(loaded, prompt)
    assert np.isfinite(resident).all()
    with open_model(path) as model:
        layers = streaming.expert_layers(model)
        # Of the layers that run, and of all of them.
        towers = {weight.name for weights in inventory.take(model).towers.values() for weight in weights}
        assert {info.name for infos in layers for info in infos} == towers
        total = sum(info.shape[0] for infos in layers for info in infos)
        together = max(len(infos) for infos in layers)
    for slots in (1, together, together + 1, total // 2, total):
        got, stats = streamed(path, prompt, slots, threads=1 + slots % 3)
        assert np.array_equal(got, resident), f"{slots} slots"
        assert stats["fills"] == stats["misses"] - stats["exhausted"]
        assert (stats["exhausted"] == 0) == (slots >= together), f"{slots} slots"
        assert stats["misses"] > 0
        if slots == total:
            assert stats["hits"] > 0
            assert stats["evictions"] == 0
