"""Experts at the ends of what files may say: very many, one or all of them chosen, routers and tables that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tiny_models
from models.driving import logits_along, runner
from tiny_models import TinyModel
from vllm_cpp import log
from vllm_cpp.config import offload
from vllm_cpp.config.offload.install import reset as reset_documents
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.residency import streaming

PROMPT, GENERATED = list(range(40, 61)), [7, 9, 11]


@pytest.fixture(autouse=True)
def _a_process_of_its_own() -> Iterator[None]:
    reset_documents()
    log.forget()
    yield
    streaming.forget_store()
    reset_documents()


def edited(folder: Path, family: str, edit: Callable[[TinyModel], None], dtype: str = "F32") -> Path:
    model = tiny_models.build(family, 1, 0, dtype)
    edit(model)
    return model.write(folder / "edited.gguf")


def many_experts(num_experts: int, top_k: int, width: int = 32) -> Callable[[TinyModel], None]:
    def edit(m: TinyModel) -> None:
        m.keys({"expert_count": num_experts, "expert_used_count": top_k, "expert_feed_forward_length": width})
        for name in [name for name in m.tensors if "_exps" in name or "ffn_gate_inp" in name]:
            n = 256
            shapes = {"ffn_gate_inp": (num_experts, n), "ffn_down_exps": (num_experts, n, width)}
            shape = shapes.get(name.split(".")[2], (num_experts, width, n))
            del m.tensors[name]
            m.matrix(name, *shape, gain=2.0, encoding="F32" if "inp" in name else None)

    return edit


@pytest.mark.parametrize(("num_experts", "top_k"), [(512, 1), (512, 10), (512, 512), (1, 1), (17, 17)])
def test_streamed_is_resident_for_any_number_of_experts(tmp_path: Path, num_experts: int, top_k: int) -> None:
    path = edited(tmp_path, "qwen3moe", many_experts(num_experts, top_k), "Q4_0")
    with runner(path) as loaded:
        resident = logits_along(loaded, PROMPT, GENERATED)
    assert np.isfinite(resident).all()
    assert np.ptp(resident) > 0
    document = {"vllm_cpp": {"expert_stream": {"enabled": True, "slots": 40}}}
    with runner(path, threads=3, residency=offload.install(offload.parse(document))) as loaded:
        assert np.array_equal(logits_along(loaded, PROMPT, GENERATED, [5]), resident)
        assert loaded.stats()["expert_stream"]["fills"] > 0


def test_all_experts_weigh_what_one_expert_of_their_sum_does(tmp_path: Path) -> None:
    """The same expert eight times over, all of them chosen and their weights normalized, is that expert alone."""

    def the_first(m: TinyModel) -> None:
        for name in [name for name in m.tensors if "_exps" in name]:
            tensor = m.tensors.pop(name)
            slices = np.frombuffer(tensor.data, "<f4").reshape(tuple(reversed(tensor.dims)))
            m.floats(name, np.broadcast_to(slices[:1], slices.shape))

    rows = []
    for top_k in (1, 8):

        def edit(m: TinyModel, top_k: int = top_k) -> None:
            the_first(m)
            m.keys({"expert_used_count": top_k})

        with runner(edited(tmp_path, "qwen3moe", edit)) as loaded:
            rows.append(logits_along(loaded, PROMPT, GENERATED))
    assert np.abs(rows[0] - rows[1]).max() <= 1e-5 * np.abs(rows[0]).max()


def without(name: str) -> Callable[[TinyModel], None]:
    def edit(m: TinyModel) -> None:
        m.kvs.pop(name, None)
        m.tensors.pop(name, None)

    return edit


def listing(expert: int) -> Callable[[TinyModel], None]:
    def edit(m: TinyModel) -> None:
        tensor = m.tensors["blk.0.ffn_gate_tid2eid.weight"]
        ids = np.frombuffer(tensor.data, "<i4").copy()
        ids[-1] = expert
        m.tensors["blk.0.ffn_gate_tid2eid.weight"] = type(tensor)(tensor.dims, tensor.ggml_id, ids.tobytes())

    return edit


@pytest.mark.parametrize(
    ("family", "edit", "said"),
    [
        ("minimax-m2", without("minimax-m2.expert_gating_func"), "expert_gating_func is missing, which minimax-m2 needs"),
        ("glm4moe", without("blk.1.exp_probs_b.bias"), r"tensor 'blk\.1\.exp_probs_b\.bias' is missing"),
        ("olmoe", without("blk.1.ffn_up_exps.weight"), r"tensor 'blk\.1\.ffn_up_exps\.weight' is missing"),
        ("qwen3moe", lambda m: m.keys({"expert_used_count": [2, 0]}), "expert_used_count of layer 1 is 0, expected 1 to expert_count, 8"),
        ("deepseek4", listing(-1), r"tensor 'blk\.0\.ffn_gate_tid2eid\.weight' lists experts -1 to \d, but the model has 8"),
        ("deepseek4", listing(8), r"tensor 'blk\.0\.ffn_gate_tid2eid\.weight' lists experts \d to 8, but the model has 8"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, family: str, edit: Callable[[TinyModel], None], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said), runner(edited(tmp_path, family, edit)):
        pass
