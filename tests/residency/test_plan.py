"""The plan of a file: sums that a person asks for, and every weight once, wherever it lives."""

from __future__ import annotations

import dataclasses

import pytest

import tiny_models
from inventories import CARD, INTEGRATED
from vllm_cpp.config.offload import Override, Residency
from vllm_cpp.gguf_file import open_model
from vllm_cpp.residency import plan
from vllm_cpp.residency.devices import CPU


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "tiny.gguf"
    tiny_models.build("qwen3moe", dtype="Q4_K", size=0).write(path)
    with open_model(path) as opened:
        yield opened


def made(model, device=CPU, **residency):
    return plan.make(model, Residency(**residency), device, streams_experts=True, places_experts=True)


def lives(result, what: str) -> dict[int | None, tuple[str, str]]:
    return {place.layer: (place.lives, place.computed_on) for place in result.places if place.what == what}


def test_the_sums(model):
    result = made(model)
    towers = [tensor for name, tensor in model.tensors.items() if "_exps" in name]
    assert result.tower_bytes == sum(tensor.n_bytes for tensor in towers)
    assert result.dense_bytes + result.tower_bytes == sum(tensor.n_bytes for tensor in model.tensors.values())
    assert result.file_bytes > result.dense_bytes + result.tower_bytes
    assert result.num_shards == 1
    assert sum(result.slices.values()) == sum(tensor.shape[0] for tensor in towers)
    assert sum(size * count for size, count in result.slices.items()) == result.tower_bytes
    assert list(result.slices) == sorted(result.slices, reverse=True)
    top_k = model.get_u32("qwen3moe.expert_used_count")
    assert result.working_set == (top_k * len(towers), top_k * sum(tensor.slice_bytes for tensor in towers))
    assert result.available_bytes is None or result.available_bytes > 0


@pytest.mark.parametrize(("mmap", "place"), [(True, "mapping"), (False, "memory")])
def test_every_weight_is_somewhere_once(model, mmap, place):
    result = made(model, mmap=mmap)
    assert sum(one.n_bytes for one in result.places) == sum(tensor.n_bytes for tensor in model.tensors.values())
    layers = range(result.inventory.num_layers)
    assert lives(result, "experts") == dict.fromkeys(layers, (place, "cpu"))
    assert lives(result, "dense") == dict.fromkeys([None, *layers], (place, "cpu"))


def test_streamed_experts_live_in_slots(model):
    assert set(lives(made(model, expert_stream=True), "experts").values()) == {("slots", "cpu")}
    assert set(lives(made(model, expert_stream=True), "dense").values()) == {("memory", "cpu")}
    assert set(lives(made(model, expert_stream=True, mmap=False), "experts").values()) == {("memory", "cpu")}
    assert set(lives(made(model, expert_stream=True, expert_stream_slot_bytes=1), "experts").values()) == {("mapping", "cpu")}
    assert set(lives(made(model, expand="VT_CPU_REF=1", expert_stream=True), "experts").values()) == {("memory", "cpu")}
    other_family = plan.make(model, Residency(expert_stream=True), CPU, streams_experts=False, places_experts=True)
    assert set(lives(other_family, "experts").values()) == {("mapping", "cpu")}


def test_on_a_card_placed_layers_stay_in_the_mapping(model):
    result = made(model, CARD, placement=(Override(r"blk\.0\.", "cpu"),))
    assert lives(result, "experts")[0] == ("mapping", "cpu")
    assert lives(result, "experts")[1] == ("cuda memory", "cuda")
    assert lives(result, "dense")[0] == ("cuda memory", "cuda")
    assert result.refusal is None
    whole = made(model, CARD)
    assert whole.need.num_tensors - result.need.num_tensors == 3
    refused = made(model, CARD, device_weight_budget_bytes=result.need.total_bytes - 1)
    assert refused.refusal is not None
    assert refused.refusal.startswith("device 'cuda' cannot serve this GGUF")


def test_the_lane_needs_an_arena_of_the_largest_slices(model):
    result = made(model, INTEGRATED, expert_stream=True, expert_stream_slots=3)
    assert result.lane.serves
    assert result.need.arena_bytes == 3 * next(iter(result.slices))
    assert made(model, INTEGRATED, expert_stream=True, expert_stream_slots=3, expert_stream_slot_bytes=7).need.arena_bytes == 21
    assert set(lives(result, "experts").values()) == {("slots", "cuda")}
    expanded = made(model, INTEGRATED, expert_stream=True, expand="VT_GGUF_KEEP_QUANT=0")
    assert expanded.lane.missing.endswith("which is not kept in the file's form")
    unprobed = dataclasses.replace(INTEGRATED, total_bytes=None)
    assert made(model, unprobed).refusal is None
