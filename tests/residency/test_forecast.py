"""The forecast of streaming against the same sums done by hand, and its two measurements."""

from __future__ import annotations

import dataclasses
import os
import re

import pytest

import tiny_models
import vllm_cpp
from vllm_cpp import models
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.offload import Residency
from vllm_cpp.gguf_file import open_model
from vllm_cpp.kernels.cpu.slots import ALIGNMENT
from vllm_cpp.models.builder import Builder
from vllm_cpp.residency import disk, forecast, memory, plan
from vllm_cpp.residency.devices import CPU
from vllm_cpp.residency.slots import SlotStore

DRIVE, MEMORY = disk.Measured(2e9, 4, 0.5), memory.Measured(40e9, 2, 0.1)
KV_BYTES = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("forecast") / "tiny.gguf"
    tiny_models.build("qwen3moe", dtype="Q4_K", size=0).write(path)
    with open_model(path) as opened:
        yield opened


@pytest.fixture
def speeds(monkeypatch):
    """Known speeds of drive and memory."""
    monkeypatch.setattr(forecast, "measure_drive", lambda *_: DRIVE)
    monkeypatch.setattr(memory, "measure", lambda *_: MEMORY)


def planned(model, available, **residency):
    made = plan.make(model, Residency(**residency), CPU, streams_experts=True, places_experts=True)
    return dataclasses.replace(made, available_bytes=available, machine_bytes=available)


def by_hand(model):
    """Of the file itself: (bytes of towers, of all else, of a token's slices, number of slices, bytes of the largest)."""
    towers = [tensor for name, tensor in model.tensors.items() if "_exps" in name]
    top_k = model.get_u32("qwen3moe.expert_used_count")
    inside = sum(tensor.n_bytes for tensor in towers)
    dense = sum(tensor.n_bytes for tensor in model.tensors.values()) - inside
    used = top_k * sum(tensor.n_bytes // tensor.shape[0] for tensor in towers)
    return inside, dense, used, sum(tensor.shape[0] for tensor in towers), max(tensor.n_bytes // tensor.shape[0] for tensor in towers)


@pytest.mark.parametrize(("machine", "others"), [(1000, 50), (1020, 31), (1052, 1), (1053, 0), (10**6, 0), (None, 0)])
def test_others_keep_their_part_of_the_machine(model, speeds, machine, others):
    """5 % of what it has; nothing more has to be left where a control group leaves less than the other 95."""
    made = planned(model, 1000 << 20, expert_stream=True, expert_stream_slots=5)
    made = dataclasses.replace(made, machine_bytes=machine and machine << 20)
    found = forecast.make(made, model, kv_bytes=KV_BYTES, threads=2)
    assert round(found.spare_bytes / 2**20) == 256 + others


def test_the_sums_are_those_of_the_file(model, speeds):
    inside, dense, used, total, largest = by_hand(model)
    cell = SlotStore(1, largest).cell_bytes
    asked_for = 5
    spare = 256 << 20
    available = int((spare + dense + KV_BYTES + 10.5 * cell) / 0.95) + 1
    found = forecast.make(planned(model, available, expert_stream=True, expert_stream_slots=asked_for), model, kv_bytes=KV_BYTES, threads=2)
    assert found.spare_bytes == spare + int(0.05 * available)
    assert found.room_bytes == available - dense - KV_BYTES - found.spare_bytes
    assert not found.fits
    assert inside > found.room_bytes
    top_k = model.get_u32("qwen3moe.expert_used_count")
    tower_count = sum("_exps" in name for name in model.tensors)
    for expected, slots in ((found.proposed, 10), (found.asked, asked_for)):
        assert (expected.slots, expected.arena_bytes) == (slots, slots * cell)
        assert expected.share == expected.even_hit_rate == slots / total
        assert expected.tokens == slots / (top_k * tower_count)
        assert expected.hit_rate == forecast.hit_rate(slots / total)
        embedding = model.tensors["token_embd.weight"].n_bytes if "output.weight" in model.tensors else 0
        assert expected.compute_s == pytest.approx((used + dense - embedding) / 40e9)
        assert expected.read_s == pytest.approx((1 - expected.hit_rate) * used / 2e9)
        assert expected.tokens_per_s == pytest.approx(1 / (expected.compute_s + expected.read_s))
        assert expected.even_tokens_per_s == pytest.approx(1 / (expected.compute_s + (1 - slots / total) * used / 2e9))
        assert expected.even_tokens_per_s < expected.tokens_per_s < expected.bound_tokens_per_s
        assert expected.bound_tokens_per_s == 1 / max(expected.compute_s, expected.read_s)


def test_what_sequences_keep_takes_room_from_the_arena(model, speeds):
    cell = SlotStore(1, by_hand(model)[-1]).cell_bytes
    made = planned(model, 1 << 30)
    with_states = forecast.make(made, model, kv_bytes=KV_BYTES, state_bytes=3 * cell, threads=2)
    without = forecast.make(made, model, kv_bytes=KV_BYTES, threads=2)
    assert (with_states.state_bytes, without.state_bytes) == (3 * cell, 0)
    assert without.room_bytes - with_states.room_bytes == 3 * cell


@pytest.mark.parametrize(
    "family", ["qwen35moe", "qwen3next", "jamba", "granitehybrid", "lfm2moe", "nemotron_h_moe", "deepseek4", "bailingmoe3"]
)
def test_states_are_counted_as_an_engine_sets_them_aside(family, tmp_path, monkeypatch):
    path = tiny_models.build(family, dtype="F32").write(tmp_path / "tiny.gguf")
    taken, real = [], Builder.state

    def state(builder, num_values):
        found = real(builder, num_values)
        taken.append(builder.keep[-1].nbytes)
        return found

    params = EngineParams(model_path=str(path), threads=1, max_num_seqs=3, num_blocks=4)
    with open_model(path) as opened:
        told = models.state_bytes(opened, params, Residency())
    monkeypatch.setattr(Builder, "state", state)
    with open_model(path) as opened:
        models.load(opened, params, Residency()).close()
    assert told == sum(taken) > 0
    monkeypatch.setattr(Builder, "state", real)
    planned = vllm_cpp.plan(str(path), measure=True, max_num_seqs=3, num_blocks=4)
    assert planned.forecast.state_bytes == told


def test_attention_alone_keeps_nothing_beside_its_cache(model):
    assert models.state_bytes(model, EngineParams(model_path=model.path), Residency()) == 0


def test_a_file_that_fits_needs_no_slots_and_gets_no_more_than_it_has_slices(model, speeds):
    inside, dense, _, total, _ = by_hand(model)
    enough = int((inside + dense + KV_BYTES + (256 << 20)) / 0.95) + 2
    assert forecast.make(planned(model, enough), model, kv_bytes=KV_BYTES, threads=1).fits
    assert not forecast.make(planned(model, enough - 4), model, kv_bytes=KV_BYTES, threads=1).fits
    plenty = forecast.make(planned(model, 100 << 30), model, kv_bytes=KV_BYTES, threads=1)
    assert plenty.proposed.slots == total
    assert (plenty.proposed.hit_rate, plenty.proposed.read_s, plenty.asked) == (1.0, 0.0, None)
    unknown = forecast.make(planned(model, None), model, kv_bytes=KV_BYTES, threads=1)
    assert unknown.fits is None
    assert unknown.proposed.slots == total


def test_without_room_nothing_is_proposed(model, speeds):
    found = forecast.make(planned(model, 1 << 20), model, kv_bytes=KV_BYTES, threads=1)
    assert (found.proposed, found.room_bytes, found.fits) == (None, 0, False)


def test_a_slot_size_that_is_asked_for_sizes_the_arena(model, speeds):
    *_, largest = by_hand(model)
    made = planned(model, 1 << 40, expert_stream=True, expert_stream_slot_bytes=3 * largest)
    assert forecast.make(made, model, kv_bytes=0, threads=1).asked.arena_bytes == 64 * SlotStore(1, 3 * largest).cell_bytes


def test_what_cannot_be_measured_is_not_made_up(model, monkeypatch):
    monkeypatch.setattr(forecast, "measure_drive", lambda *_: None)
    monkeypatch.setattr(memory, "measure", lambda *_: None)
    found = forecast.make(planned(model, 1 << 40), model, kv_bytes=0, threads=1)
    assert found.proposed.tokens_per_s is found.proposed.bound_tokens_per_s is found.proposed.even_tokens_per_s is None
    assert found.measuring_s == 0


def test_a_dense_model_has_no_forecast(tmp_path):
    with open_model(tiny_models.build("qwen3", dtype="F32").write(tmp_path / "dense.gguf")) as dense:
        made = plan.make(dense, Residency(expert_stream=True), CPU, streams_experts=True, places_experts=True)
        assert forecast.make(made, dense, kv_bytes=0, threads=1) is None
        assert made.unstreamed == "it has no routed experts"


def test_why_nothing_would_be_streamed_is_part_of_the_plan(model):
    assert planned(model, None).unstreamed == planned(model, None, expert_stream=True).unstreamed == ""
    assert planned(model, None, expert_stream=True, mmap=False).unstreamed.startswith("mmap is off")
    assert planned(model, None, expert_stream=True, expand="VT_GGUF_KEEP_QUANT=0").unstreamed.startswith("VT_GGUF_KEEP_QUANT=0 expands")
    tight = planned(model, None, expert_stream=True, expert_stream_slot_bytes=1)
    assert tight.unstreamed.startswith("no layer's slices fit slots of 1 byte")


def test_hits_follow_the_records_and_never_fall():
    for share, hits in forecast.RECORDED:
        assert forecast.hit_rate(share) == pytest.approx(hits)
    (low, at_low), (high, at_high) = forecast.RECORDED[3:5]
    assert forecast.hit_rate((low + high) / 2) == pytest.approx((at_low + at_high) / 2)
    rates = [forecast.hit_rate(i / 200) for i in range(201)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0.0, 1.0)
    assert all(rate >= i / 200 for i, rate in enumerate(rates)), "even routing hits the share itself: no record is below it"


def test_the_drive_is_read_at_slices_past_the_page_cache(tmp_path):
    path = tmp_path / "towers"
    path.write_bytes(bytes(40 * ALIGNMENT))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        found = disk.measure(fd, [(100, 5000, 8), (40100, 5000, 16)], 2 * ALIGNMENT, 3)
    finally:
        os.close(fd)
    assert found.bytes_per_s > 0
    assert found.lanes == 3
    assert 0 < found.seconds < 5


def test_memory_is_read_where_there_is_room_for_it():
    found = memory.measure(2, 64 << 20)
    assert 1e8 < found.bytes_per_s < 1e13
    assert found.threads == 2
    assert memory.measure(2, 1 << 20) is None


def test_a_limit_is_the_least_of_the_groups(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 3000\n")
    monkeypatch.setattr(memory, "_CGROUP", str(tmp_path))
    monkeypatch.setattr(memory, "_OWN_GROUPS", str(tmp_path / "none"))
    assert memory.group_limit_bytes() == 5000
    assert memory.available_bytes() == 4000
    assert memory.machine_headroom() > 4000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.group_limit_bytes() is None
    assert re.fullmatch(r"\d+", str(memory.available_bytes()))
