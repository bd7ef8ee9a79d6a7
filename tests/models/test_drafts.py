"""Blocks that only guess further tokens: a file that has one gives the logits of the same file without it, and pays nothing for it."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

import oracle
from models.driving import logits_along, runner
from tiny_models import TinyModel, outline
from tiny_models.container import ARRAY
from vllm_cpp import models
from vllm_cpp.config import offload
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.gguf_file import hparams, open_model
from vllm_cpp.residency import inventory

KEY = "nextn_predict_layers"


def with_drafts() -> list[str]:
    found = []
    for family in oracle.families():
        for size in oracle.sizes_of(family):
            model = outline(family, size)
            if f"{model.arch}.{KEY}" in model.kvs:
                found.append(oracle.case_of(family, size))
    return found


def without_drafts(model: TinyModel) -> TinyModel:
    """The model with its last blocks cut off: their tensors, their entries in arrays of one value a block, their number."""
    prefix = f"{model.arch}."
    (drafts,) = struct.unpack_from("<I", model.kvs.pop(prefix + KEY), 4)
    (blocks,) = struct.unpack_from("<I", model.kvs[prefix + "block_count"], 4)
    model.keys({"block_count": blocks - drafts})
    for key, stored in model.kvs.items():
        kind, _, n = struct.unpack_from("<IIQ", stored.ljust(16))
        if key.startswith(prefix) and kind == ARRAY and n == blocks:
            width = (len(stored) - 16) // blocks
            model.kvs[key] = stored[:8] + struct.pack("<Q", blocks - drafts) + stored[16 : -width * drafts]
    for name in list(model.tensors):
        block = re.match(r"blk\.(\d+)\.", name)
        if block and int(block[1]) >= blocks - drafts:
            del model.tensors[name]
    return model


@pytest.mark.parametrize("name", with_drafts())
def test_a_draft_block_changes_nothing_and_costs_nothing(name: str, tiny_model, tmp_path: Path) -> None:
    recording = oracle.load(name)
    prompt, generated = recording["prompt"].tolist(), recording["generated"].tolist()
    whole, cut = tiny_model(name), without_drafts(oracle.cases()[name].model()).write(tmp_path / "cut.gguf")
    assert cut.stat().st_size < whole.stat().st_size
    seen = []
    for path in (whole, cut):
        with runner(path, kv_cache_dtype="f16") as loaded:
            rows = logits_along(loaded, prompt, generated)
            weights = loaded._weights
            seen.append((rows, weights.borrowed_bytes + weights.copied_bytes, kv_blocks(path), str(loaded.program)))
        with open_model(path) as model:
            seen[-1] += (inventory.take(model).weights,)
    (rows, *costs), (expected, *expected_costs) = seen
    assert np.array_equal(rows, expected)
    assert costs == expected_costs


def kv_blocks(path: Path) -> int:
    """How many KV blocks a megabyte holds."""
    params = EngineParams(model_path=str(path), threads=1, kv_cache_memory_bytes=1 << 20)
    with open_model(path) as model:
        loaded = models.load(model, params, offload.resolve())
        loaded.close()
        return loaded.num_blocks


@pytest.mark.parametrize("name", with_drafts())
def test_tensors_of_draft_blocks_are_not_there_for_who_loads(name: str, tiny_model, tmp_path: Path) -> None:
    cut = without_drafts(oracle.cases()[name].model()).write(tmp_path / "cut.gguf")
    with open_model(tiny_model(name)) as whole, open_model(cut) as expected:
        assert len(whole.tensors) > len(expected.tensors)
        assert list(hparams.without_drafts(whole).tensors) == list(expected.tensors)
        assert list(hparams.without_drafts(expected).tensors) == list(expected.tensors)
