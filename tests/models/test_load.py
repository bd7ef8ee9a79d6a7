"""What a load that fails gives back."""

from __future__ import annotations

import pytest

from vllm_cpp import models
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.offload import Residency
from vllm_cpp.gguf_file import open_model


class Stream:
    """Stands for a model's use of the slot store; streams nothing."""

    names: frozenset[str] = frozenset()
    closed = 0

    def asking(self, *_, **__):
        return None

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("step", ["Weights", "Builder", "Runner"])
def test_a_load_that_fails_closes_what_it_opened(tiny_model, monkeypatch, step):
    def fails(*_, **__):
        raise MemoryError

    stream, closed = Stream(), []
    monkeypatch.setattr(models, "open_stream", lambda *_, **__: stream)
    monkeypatch.setattr(models.Weights, "close", lambda weights: closed.append(weights))
    monkeypatch.setattr(models, step, fails)
    path = tiny_model("qwen2moe-s1-z0-F32")
    with open_model(path) as model, pytest.raises(MemoryError):
        models.load(model, EngineParams(model_path=str(path), threads=1, num_blocks=4), Residency())
    assert stream.closed == 1
    assert len(closed) == (step != "Weights")
