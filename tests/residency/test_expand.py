"""Weights made float32 while loading: which ones, to the values the naive decoders give, and only where there is memory for them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

import oracle
import tiny_models
from reference.decoders import decode
from vllm_cpp import log, models
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.offload import Residency
from vllm_cpp.config.offload.resolve import NO_BLOCKS, REFERENCE
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import GGUFModel, open_model
from vllm_cpp.residency import expand
from vllm_cpp.residency.expand import ExpandedWeights


@pytest.fixture
def model(tmp_path: Path):
    tiny_models.build("qwen2moe", dtype="mix").write(tmp_path / "tiny.gguf")
    log.forget()
    with open_model(tmp_path / "tiny.gguf") as opened:
        yield opened


def matrices(model: GGUFModel) -> dict:
    return {name: info for name, info in model.tensors.items() if len(info.shape) > 1}


@pytest.mark.parametrize(("lane", "kept"), [(REFERENCE, {"F32"}), (NO_BLOCKS, {"F32", "F16", "BF16"})])
def test_values_are_the_decoded_ones_and_the_rest_is_borrowed(model: GGUFModel, lane: str, kept: set[str]) -> None:
    weights = ExpandedWeights(model, Residency(expand=lane))
    assert {info.encoding.name for info in matrices(weights.model).values()} == kept & {
        "F32",
        *(info.encoding.name for info in matrices(model).values()),
    }
    for name, info in matrices(model).items():
        seen = weights.model.tensors[name]
        address = weights.address(seen)
        assert weights.address(seen) == address
        if info.encoding.name in kept:
            assert (address, seen) == (info.address, info)
            continue
        values = np.frombuffer(ctypes.string_at(address, seen.n_bytes), np.float32).reshape(seen.shape)
        expected = decode(info.encoding.name, model.bytes_of(name)).reshape(info.shape)
        assert np.array_equal(values, expected.astype(np.float32)), name
    assert weights.copied_bytes == sum(4 * np.prod(i.shape) for i in matrices(model).values() if i.encoding.name not in kept)
    weights.close()


def test_vectors_stay_as_they_are(model: GGUFModel) -> None:
    view = ExpandedWeights(model, Residency(expand=REFERENCE)).model
    assert all(view.tensors[name] is info for name, info in model.tensors.items() if len(info.shape) == 1)
    assert view.bytes_of("output_norm.weight").tobytes() == model.bytes_of("output_norm.weight").tobytes()


def test_too_little_memory_is_refused_with_both_figures(model: GGUFModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand, "available_bytes", lambda: 1 << 20)
    needed = sum(4 * np.prod(info.shape) for info in matrices(model).values() if info.encoding.name != "F32")
    assert needed > 1 << 20
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: expanded to float32 \(VT_CPU_REF=1\) its weights take 0\.\d\d GiB, but 0\.00"):
        ExpandedWeights(model, Residency(expand=REFERENCE))


def test_expanded_experts_are_not_streamed_and_a_line_says_so(model: GGUFModel, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = models.load(model, EngineParams(model_path="-", threads=1), Residency(expand=NO_BLOCKS, expert_stream=True))
    loaded.close()
    said = capfd.readouterr().err
    assert f"nothing of {model.path} is streamed: VT_GGUF_KEEP_QUANT=0 expands its experts to float32" in said
    assert "engine: VT_GGUF_KEEP_QUANT=0: " in said
    assert loaded.stats() == {}


def test_without_blocks_activations_of_the_rest_are_as_ever(tiny_model) -> None:
    """F16 weights are no blocks: this lane leaves such a model alone."""
    name = next(name for name in oracle.used_cases() if name.endswith("-F16"))
    with open_model(tiny_model(name)) as opened:
        weights = ExpandedWeights(opened, Residency(expand=NO_BLOCKS))
        assert weights.model.tensors == opened.tensors
