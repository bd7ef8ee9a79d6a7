"""The inventory of real (tiny) files: towers told from the rest, layers that only predict left out."""

from __future__ import annotations

import pytest

import tiny_models
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import open_model
from vllm_cpp.residency import inventory


def taken(tmp_path, family: str, **build):
    tiny_models.build(family, **build).write(tmp_path / "tiny.gguf")
    with open_model(tmp_path / "tiny.gguf") as model:
        return inventory.take(model), {name: (tensor.n_bytes, tensor.shape) for name, tensor in model.tensors.items()}


@pytest.mark.parametrize("family", ["qwen3moe", "olmoe", "qwen2moe"])
def test_towers_are_the_routed_experts_and_nothing_else(tmp_path, family):
    items, tensors = taken(tmp_path, family, dtype="mix")
    assert {weight.name: weight.n_bytes for weight in items.weights} == {name: size for name, (size, _) in tensors.items()}
    towers = [weight for weights in items.towers.values() for weight in weights]
    assert {weight.name for weight in towers} == {name for name in tensors if name.endswith("_exps.weight")}
    assert list(items.towers) == list(range(items.num_layers))
    for tower in towers:
        assert tower.slice_bytes * tensors[tower.name][1][0] == tower.n_bytes
    assert all(items.top_k[layer] > 0 for layer in items.towers)


def test_a_dense_model_has_no_towers(tmp_path):
    items, _ = taken(tmp_path, "llama", dtype="F32")
    assert items.towers == {}
    assert {weight.layer for weight in items.weights} == {None, *range(items.num_layers)}


def test_layers_that_only_predict_further_tokens_are_left_out(tmp_path):
    model = tiny_models.build("qwen3moe", dtype="F32")
    model.keys({"nextn_predict_layers": 1})
    model.matrix("blk.1.nextn.eh_proj.weight", 256, 512)  # such layers have one: without it, it would run like the others
    model.write(tmp_path / "nextn.gguf")
    with open_model(tmp_path / "nextn.gguf") as opened:
        items = inventory.take(opened)
        whole = opened.get_u32("qwen3moe.block_count")
    assert items.num_layers == whole - 1
    assert {weight.layer for weight in items.weights} == {None, *range(whole - 1)}


@pytest.mark.parametrize(("layers", "nextn", "key"), [(0, 0, "block_count"), (2**31 - 2, 0, "block_count"), (2, 2, "nextn_predict_layers")])
def test_layers_that_cannot_be_are_refused_by_the_key(tmp_path, layers, nextn, key):
    model = tiny_models.build("qwen2moe", dtype="F32")
    model.keys({"block_count": layers, "nextn_predict_layers": nextn})
    model.write(tmp_path / "lies.gguf")
    with open_model(tmp_path / "lies.gguf") as opened, pytest.raises(ModelLoadError, match=rf"key 'qwen2moe\.{key}' at byte \d+: is"):
        inventory.take(opened)


@pytest.mark.parametrize("top_k", [3, [3, 1, 2, 4]])
def test_top_k_is_known_of_the_layers_with_towers(tmp_path, top_k):
    model = tiny_models.build("qwen3moe", dtype="F32")
    model.keys({"expert_used_count": top_k, "block_count": 4})
    for part in ("gate", "up", "down"):
        del model.tensors[f"blk.0.ffn_{part}_exps.weight"]
    model.write(tmp_path / "some.gguf")
    with open_model(tmp_path / "some.gguf") as opened:
        items = inventory.take(opened)
    each = [top_k] * 4 if isinstance(top_k, int) else top_k
    assert items.top_k == {layer: each[layer] for layer in items.towers}
    assert 0 not in items.towers
    assert items.towers


def test_a_tower_by_another_name_is_none(tmp_path):
    model = tiny_models.build("qwen3moe", dtype="F32")
    model.tensors["blk.0.ffn_up_exps.bias"] = model.tensors["blk.0.ffn_norm.weight"]
    model.tensors["mtp.blk.0.ffn_up_exps.weight"] = model.tensors["blk.0.ffn_up_exps.weight"]
    model.write(tmp_path / "strange.gguf")
    with open_model(tmp_path / "strange.gguf") as opened:
        weights = {weight.name: weight for weight in inventory.take(opened).weights}
    assert weights["blk.0.ffn_up_exps.bias"].num_experts == 0
    assert weights["mtp.blk.0.ffn_up_exps.weight"].num_experts == 0
    assert weights["mtp.blk.0.ffn_up_exps.weight"].layer is None
