"""Which towers are streamed, and that slices in any form give the resident bits: gate and up in one, alone, or beside chunk experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tiny_models
from tests.residency.test_streaming import logits, reset_documents, runner, slice_count
from tiny_models.container import Stored
from vllm_cpp import log
from vllm_cpp.gguf_file import open_model
from vllm_cpp.residency import streaming


@pytest.fixture(autouse=True)
def _a_process_of_its_own() -> Iterator[None]:
    reset_documents()
    log.forget()
    yield
    streaming.forget_store()
    reset_documents()


def resident_and_streamed(path: Path, slot_counts: list[int]) -> np.ndarray:
    """The resident logits, which those with so many slots were found to equal."""
    with runner(path, slots=None) as loaded:
        resident = logits(loaded)
    assert np.isfinite(resident).all()
    for slots in slot_counts:
        with runner(path, slots=slots, threads=1 + slots % 3) as loaded:
            assert np.array_equal(logits(loaded), resident), f"{slots} slots"
            stats = loaded.stats()["expert_stream"]
        assert stats["fills"] > 0
        streaming.forget_store()
        reset_documents()
    return resident


def fused(model: tiny_models.TinyModel, num_experts: int) -> tiny_models.TinyModel:
    """The same model with every layer's gate and up in one tower, an expert's gate rows before its up rows."""
    for name in [name for name in model.tensors if name.endswith("ffn_gate_exps.weight")]:
        gate, up = model.tensors.pop(name), model.tensors.pop(name.replace("gate", "up"))
        assert gate.ggml_id == up.ggml_id
        slices = [np.frombuffer(part.data, np.uint8).reshape(num_experts, -1) for part in (gate, up)]
        k, width, _ = gate.dims
        whole = Stored((k, 2 * width, num_experts), gate.ggml_id, np.concatenate(slices, 1).tobytes())
        model.tensors[name.replace("gate", "gate_up")] = whole
    return model


@pytest.mark.parametrize("dtype", ["F32", "mix"])
def test_gate_and_up_in_one_tower(tmp_path: Path, dtype: str) -> None:
    """The bits of the same weights in two towers, resident and through any number of slots; a layer then has two towers."""
    separate = tiny_models.build("qwen3moe", 1, 0, dtype).write(tmp_path / "separate.gguf")
    with runner(separate, slots=None) as loaded:
        expected = logits(loaded)
    whole = fused(tiny_models.build("qwen3moe", 1, 0, dtype), 8).write(tmp_path / "fused.gguf")
    with open_model(whole) as model:
        layers = streaming.expert_layers(model)
    assert [[info.name for info in towers] for towers in layers] == [
        [f"blk.{il}.ffn_{part}_exps.weight" for part in ("gate_up", "down")] for il in range(len(layers))
    ]
    total = slice_count(whole)
    assert total * 3 == slice_count(separate) * 2
    assert np.array_equal(resident_and_streamed(whole, [1, 2, 3, 7, total - 1, total]), expected)


def test_chosen_slices_of_a_fused_tower_are_asked_for(tmp_path: Path, monkeypatch) -> None:
    """A model beyond memory, not streamed: what is advised changes nothing."""
    path = fused(tiny_models.build("qwen3moe", 1, 0, "mix"), 8).write(tmp_path / "fused.gguf")
    with runner(path, slots=None) as loaded:
        expected = logits(loaded)
    monkeypatch.setattr("vllm_cpp.residency.borrow.available_bytes", lambda: 1 << 10)
    with runner(path, slots=None, threads=3) as loaded:
        assert "ask for the chosen slices of blk.0.ffn_gate_up_exps.weight, blk.0.ffn_down_exps.weight" in str(loaded.program)
        assert np.array_equal(logits(loaded), expected)


def test_layers_that_only_predict_are_not_streamed(tmp_path: Path) -> None:
    model = tiny_models.build("qwen3moe", 2, 1, "F32")
    model.keys({"nextn_predict_layers": 1})
    model.matrix("blk.2.nextn.eh_proj.weight", 32, 64)  # such layers have one
    path = model.write(tmp_path / "nextn.gguf")
    with open_model(path) as opened:
        names = {info.name for towers in streaming.expert_layers(opened) for info in towers}
    assert {int(name.split(".")[1]) for name in names} == {0, 1}
    resident_and_streamed(path, [4, 40])


def test_chunk_experts_are_a_layer_of_their_own(tmp_path: Path) -> None:
    """They have another number of experts, chosen by themselves; an architecture that does not use them streams the others."""
    model = tiny_models.build("qwen3moe", 1, 0, "F32")
    for part in ("gate", "up", "down"):
        model.matrix(f"blk.1.ffn_{part}_chexps.weight", 3, 64, 64)
    path = model.write(tmp_path / "chunks.gguf")
    with open_model(path) as opened:
        layers = streaming.expert_layers(opened)
    names = [[info.name.removesuffix(".weight") for info in towers] for towers in layers]
    order = ("gate", "up", "down")
    assert names == [[f"blk.{il}.ffn_{part}_{kind}" for part in order] for il, kind in ((0, "exps"), (1, "exps"), (1, "chexps"))]
    resident_and_streamed(path, [5, 48])
