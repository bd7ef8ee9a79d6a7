"""A model in several files is the same model, also where the first of them holds no tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import oracle
from models.driving import logits_along, runner
from vllm_cpp.config import offload
from vllm_cpp.config.offload.install import reset as reset_documents
from vllm_cpp.residency import streaming

CASE = "qwen3moe-s1-z0-mix"


@pytest.mark.parametrize(("shards", "first_empty"), [(3, False), (2, True), (4, True)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_split_set_gives_the_logits_of_the_whole_file(shards: int, first_empty: bool, stream: bool, tiny_model, tmp_path: Path) -> None:
    recording = oracle.load(CASE)
    prompt, generated = recording["prompt"].tolist(), recording["generated"].tolist()
    with runner(tiny_model(CASE)) as loaded:
        whole = logits_along(loaded, prompt, generated)
    paths = oracle.cases()[CASE].model().write_split(tmp_path / "set.gguf", shards, first_empty=first_empty)
    assert (paths[0].stat().st_size < 20_000) == first_empty
    document = {"vllm_cpp": {"expert_stream": {"enabled": stream, "slots": 9}}}
    try:
        with runner(paths[-1], threads=2, residency=offload.install(offload.parse(document))) as loaded:
            assert np.array_equal(logits_along(loaded, prompt, generated), whole)
            assert ("expert_stream" in loaded.stats()) == stream
    finally:
        streaming.forget_store()
        reset_documents()
