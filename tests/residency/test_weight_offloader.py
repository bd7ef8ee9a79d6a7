"""vLLM-style weight offload while loading: the budget that may overshoot, the groups of layers, and the checks before and after a load."""

from __future__ import annotations

import pytest

from inventories import CARD
from vllm_cpp.config.offload import WeightOffload
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.residency.devices import CPU
from vllm_cpp.residency.weight_offloader import WeightOffloader, offloader_for

MIB = 1 << 20
GB = 4 / 1024  # four MiB, in GiB


def kept_off(config: WeightOffload, weights: list[tuple[str, int, int | None]]) -> list[str]:
    offloader = WeightOffloader(config)
    return [name for name, n_bytes, layer in weights if offloader.keeps_off_device(name, n_bytes, layer)]


def test_the_budget_is_tested_before_a_weight_and_never_against_its_size():
    weights = [("a", 3 * MIB, 0), ("b", 5 * MIB, 0), ("c", 1, 0), ("d", 0, 0)]
    assert kept_off(WeightOffload(cpu_offload_gb=GB), weights) == ["a", "b"]
    assert kept_off(WeightOffload(cpu_offload_gb=GB), [("a", 4 * MIB, None), ("b", 1, None)]) == ["a"]
    assert kept_off(WeightOffload(cpu_offload_gb=GB), [("a", 4 * MIB - 1, None), ("b", 1 << 40, None), ("c", 1, None)]) == ["a", "b"]


def test_named_weights_only_spend_the_budget():
    config = WeightOffload(cpu_offload_gb=GB, cpu_offload_params=frozenset({"ffn_up_exps", "output"}))
    weights = [
        ("blk.0.ffn_up.weight", 9 * MIB, 0),
        ("blk.0.ffn_up_exps.weight", MIB, 0),
        ("output.weight", MIB, None),
        ("output_norm", 1, None),
    ]
    assert kept_off(config, weights) == ["blk.0.ffn_up_exps.weight", "output.weight"]


def test_prefetch_goes_by_layer():
    weights = [(f"blk.{layer}.{part}.weight", MIB, layer) for layer in range(8) for part in ("attn_q", "ffn_up")]
    weights.append(("output.weight", MIB, None))
    every = WeightOffload(group_size=4, num_in_group=1)
    assert kept_off(every, weights) == [f"blk.{layer}.{part}.weight" for layer in (3, 7) for part in ("attn_q", "ffn_up")]
    named = WeightOffload(group_size=4, num_in_group=2, prefetch_params=frozenset({"ffn_up"}))
    assert kept_off(named, weights) == [f"blk.{layer}.ffn_up.weight" for layer in (2, 3, 6, 7)]


def test_the_named_backend_wins_over_the_other_s_fields():
    both = {"cpu_offload_gb": GB, "group_size": 2}
    weights = [("blk.0.a", MIB, 0), ("blk.1.a", MIB, 1)]
    assert kept_off(WeightOffload(backend="uva", **both), weights) == ["blk.0.a", "blk.1.a"]
    assert kept_off(WeightOffload(backend="prefetch", **both), weights) == ["blk.1.a"]
    assert kept_off(WeightOffload(**both), weights) == ["blk.1.a"]


ENABLED = [WeightOffload(cpu_offload_gb=1), WeightOffload(group_size=2)]


@pytest.mark.parametrize("config", ENABLED)
@pytest.mark.parametrize("device", [CPU, CARD])
def test_a_loader_that_asks_nothing_is_refused_before_it_loads(config, device):
    with pytest.raises(ModelLoadError) as caught:
        offloader_for(config, architecture="qwen3moe", consults=False, device=device)
    text, _, about_cpu = str(caught.value).partition(" (The device here")
    assert text == (
        'weight offload is configured but architecture "qwen3moe" does not support it: its loader does not consult the weight offloader, '
        "so every weight would stay on the device and the budget would free nothing. Remove --offload-config, or wire this model's loader."
    )
    assert bool(about_cpu) is (device is CPU)


@pytest.mark.parametrize("config", ENABLED)
def test_on_the_cpu_nothing_would_be_freed_and_that_is_said(config):
    with pytest.raises(ModelLoadError, match="offloading to the CPU frees nothing"):
        offloader_for(config, architecture="qwen3moe", consults=True, device=CPU)


@pytest.mark.parametrize("config", ENABLED)
def test_a_loader_that_claims_support_and_asks_nothing_is_refused_after_it_loaded(config):
    offloader = offloader_for(config, architecture="qwen3moe", consults=True, device=CARD)
    assert offloader is not None
    with pytest.raises(ModelLoadError, match=r"consulted the offloader about no weight.*a defect of that loader"):
        offloader.refuse_unconsulted("qwen3moe")
    offloader.keeps_off_device("output.weight", 1, None)
    offloader.refuse_unconsulted("qwen3moe")


@pytest.mark.parametrize("config", [WeightOffload(), WeightOffload(backend="uva"), WeightOffload(backend="uva", group_size=2)])
def test_a_backend_without_a_budget_is_no_offload(config):
    assert offloader_for(config, architecture="qwen3moe", consults=False, device=CPU) is None
