"""What a load that fails gives back, and what one that succeeds says of tensors that nobody read."""

from __future__ import annotations

import pytest

import oracle
import tiny_models
from models.driving import runner
from vllm_cpp import log, models
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


@pytest.mark.parametrize("name", [oracle.case_of(family, size) for family in oracle.families() for size in oracle.sizes_of(family)])
def test_every_tensor_of_a_recorded_model_is_read(tiny_model, capfd, name):
    log.forget()
    with runner(tiny_model(name)):
        pass
    assert "does not read" not in capfd.readouterr().err


def test_tensors_that_a_family_does_not_read_are_named(tmp_path, capfd):
    model = tiny_models.build("qwen3", 1, 0)
    for il in range(2):
        model.vector(f"blk.{il}.attn_output.bias", 256)
        model.vector(f"blk.{il}.attn_q.input_scale", 1)
    model.vector("output.bias", 320)
    model.vector("blk.0.attn_sinks.weight", 4)
    for _ in range(2):  # said once
        with runner(model.write(tmp_path / "m.gguf")):
            pass
    said = [line for line in capfd.readouterr().err.splitlines() if "does not read" in line]
    names = "blk.0.attn_output.bias, blk.1.attn_output.bias, output.bias, …"
    (only,) = said
    assert f"m.gguf: qwen3 does not read 4 of its {len(model.tensors)} tensors ({names}); if the model was made with them" in only
