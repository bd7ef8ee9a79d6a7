"""Placement: which layers' experts are computed on the CPU, against the tensor names of every kind of family."""

from __future__ import annotations

import pytest

from inventories import CARD, FAMILIES, UNPROBED, inventory
from vllm_cpp.config.offload import Override, parse
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.residency.device_fit import Lane, Need, need_of, staged_bytes
from vllm_cpp.residency.devices import CPU
from vllm_cpp.residency.placement import fitting, place, stated

NO_LANE = Lane("off")
WITH_EXPERTS = [name for name, (_, _, towers, _) in FAMILIES.items() if towers]


def asked(**placement) -> tuple[Override, ...]:
    return parse({"vllm_cpp": {"placement": placement}}).residency.desugared()


def placed(architecture, device=CARD, *, fit=False, wired=True, budget=None, items=None, overrides=(), **placement):
    items = items or inventory(architecture)
    overrides = overrides or asked(**placement)
    need = need_of(items, lane=NO_LANE)
    return place(items, device, overrides=overrides, fit=fit, wired=wired, need=need, budget=budget)


def override(pattern: str, device: str = "cpu") -> dict[str, str]:
    return {"pattern": pattern, "device": device}


@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_cpu_moe_places_every_layer_that_has_experts(architecture):
    num_layers, _, _, with_towers = FAMILIES[architecture]
    result = placed(architecture, cpu_moe=True)
    assert (result.on_cpu, result.origin) == (tuple(with_towers), "stated")
    [line] = result.lines
    assert line == (
        f"engine: device placement INSTALLED: {len(with_towers)} layers run their routed experts on cpu, the rest on cuda "
        f"(resolved against {num_layers} layers, origin stated)"
    )


@pytest.mark.parametrize("architecture", WITH_EXPERTS)
@pytest.mark.parametrize("count", [1, 2, 4096])
def test_n_cpu_moe_counts_layers_of_the_model_with_or_without_experts(architecture, count):
    with_towers = FAMILIES[architecture][3]
    result = placed(architecture, n_cpu_moe=count)
    assert result.on_cpu == tuple(layer for layer in with_towers if layer < count)


def test_layer_1_is_not_layer_11():
    assert placed("nemotron_h_moe", overrides=(Override(r"blk\.1\.", "cpu"),)).on_cpu == (1,)
    assert placed("nemotron_h_moe", n_cpu_moe=2).on_cpu == (1,)


@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_a_pattern_is_found_anywhere_in_the_name(architecture):
    last = FAMILIES[architecture][3][-1]
    assert placed(architecture, overrides=asked(overrides=[override(rf"k\.{last}\..*exps\.")])).on_cpu == (last,)
    assert placed(architecture, overrides=asked(overrides=[override("^ffn")])).on_cpu == ()


def test_the_first_match_wins_and_the_order_is_overrides_then_cpu_moe_then_n_cpu_moe():
    towers = inventory("qwen3moe").towers
    both = (Override(r"blk\.[01]\.", "cuda", path="a"), Override(r"blk\.", "cpu", path="b"))
    with pytest.raises(ModelLoadError, match=r'"a\.device" is "cuda", the engine\'s own device, and a placement target must be cpu'):
        stated(towers, both, "cuda")
    devices, idle = stated(towers, (Override("up|gate|down", "cpu", path="b"), Override("exps", "cpu", path="c")), "cuda")
    assert devices == dict.fromkeys(range(4), "cpu")
    assert [one.path for one in idle] == ["c"]


def test_a_second_device_is_refused():
    with pytest.raises(ModelLoadError, match=r'"vllm_cpp\.x\.device" is "rocm", a second device beside the engine\'s cuda'):
        placed("qwen3moe", overrides=(Override("exps", "rocm", path="vllm_cpp.x"),))


@pytest.mark.parametrize(
    ("architecture", "pattern", "names"),
    [
        ("qwen3moe", r"blk\.2\.ffn_up_exps", ("'blk.2.ffn_gate_exps.weight' on cuda", "'blk.2.ffn_up_exps.weight' on cpu")),
        ("qwen35moe", "gate_up_exps", ("'blk.0.ffn_gate_up_exps.weight' on cpu", "'blk.0.ffn_down_exps.weight' on cuda")),
        ("nemotron_h_moe", "ffn_up", ("'blk.1.ffn_up_exps.weight' on cpu", "'blk.1.ffn_down_exps.weight' on cuda")),
        ("grovemoe", "_exps", ("'blk.0.ffn_gate_exps.weight' on cpu", "'blk.0.ffn_gate_chexps.weight' on cuda")),
    ],
)
def test_a_layer_that_would_be_split_is_refused_naming_both(architecture, pattern, names):
    with pytest.raises(ModelLoadError, match="the placement splits the routed experts of layer") as caught:
        placed(architecture, overrides=asked(overrides=[override(pattern)]))
    assert all(name in str(caught.value) for name in names)


def test_what_matches_no_tower_is_said():
    result = placed("qwen3moe", overrides=asked(overrides=[override("exps"), override("attn_q")]))
    assert result.on_cpu == (0, 1, 2, 3)
    [_, idle] = result.lines
    assert idle == (
        'engine: device placement: "vllm_cpp.placement.overrides[1]" (attn_q) decides no routed-expert tower of this model, so it places '
        "nothing"
    )
    nothing = placed("qwen3moe", overrides=asked(overrides=[override("attn_q")]))
    assert (nothing.on_cpu, nothing.origin) == ((), "")
    assert nothing.lines[0] == "engine: device placement: no routed-expert tower of this model matches, so nothing is placed"
    assert placed("deepseek2", n_cpu_moe=1).lines == (nothing.lines[0],)
    assert placed("llama", cpu_moe=True).lines == ("engine: device placement: this model has no routed experts, so nothing is placed",)


def test_a_family_that_is_not_wired_is_refused():
    with pytest.raises(ModelLoadError, match='a placement is configured but architecture "qwen3moe" does not honour it'):
        placed("qwen3moe", wired=False, cpu_moe=True)
    with pytest.raises(ModelLoadError, match="does not honour it"):
        placed("qwen3moe", wired=False, fit=True)
    assert placed("qwen3moe", wired=False).lines == ()


def test_eagerly_resident_fp4_is_refused_where_it_is_placed_only():
    items = inventory("qwen3moe", ffn_up_exps="NVFP4")
    with pytest.raises(
        ModelLoadError, match=r"layer 0 cannot be placed on cpu: 'blk.0.ffn_up_exps.weight' is NVFP4, which cuda makes resident"
    ):
        placed("qwen3moe", items=items, cpu_moe=True)
    with pytest.raises(ModelLoadError, match="layer 3 cannot be placed"):
        placed("qwen3moe", items=items, fit=True, budget=need_of(items, lane=NO_LANE).total_bytes - 1)
    assert placed("qwen3moe", items=items).on_cpu == ()
    assert placed("qwen3moe", items=inventory("qwen3moe", ffn_up_exps="MXFP4"), cpu_moe=True).on_cpu == (0, 1, 2, 3)


class TestOnACpuEngine:
    def test_nothing_is_placed_and_that_is_said(self):
        result = placed("qwen3moe", CPU, wired=False, cpu_moe=True, n_cpu_moe=2)
        assert result.on_cpu == ()
        assert result.lines == (
            "engine: device placement: 3 override(s) resolve(s) to the engine's own device (cpu), so nothing is placed",
        )

    def test_fit_has_nothing_to_place(self):
        assert placed("qwen3moe", CPU, fit=True, budget=1).lines == (
            "engine: device placement: fit has nothing to place, the engine's own device is cpu",
        )

    def test_nothing_asked_is_nothing_said(self):
        assert placed("qwen3moe", CPU).lines == placed("qwen3moe").lines == ()


class TestFit:
    def test_whole_layers_the_last_first_until_the_rest_fits(self):
        sizes = {1: 10, 2: 20, 3: 30}
        assert fitting(sizes, 100, 100) == ()
        assert fitting(sizes, 101, 100) == (3,)
        assert fitting(sizes, 130, 100) == (3,)
        assert fitting(sizes, 131, 100) == (2, 3)
        assert fitting(sizes, 500, 100) == (1, 2, 3)

    @pytest.mark.parametrize("architecture", WITH_EXPERTS)
    def test_a_real_file_s_layers(self, architecture):
        items = inventory(architecture)
        need = need_of(items, lane=NO_LANE).total_bytes
        last, *_ = sorted(items.towers, reverse=True)
        size = sum(map(staged_bytes, items.towers[last]))
        result = placed(architecture, fit=True, budget=need - size)
        assert (result.on_cpu, result.origin) == ((last,), "fit")
        assert result.lines[0].endswith(f"(resolved against {items.num_layers} layers, origin fit)")
        assert need_of(items, lane=NO_LANE, placed=result.on_cpu).total_bytes == need - size
        assert len(placed(architecture, fit=True, budget=need - size - 1).on_cpu) == min(2, len(items.towers))

    def test_what_fits_already_or_cannot_be_measured_is_said(self):
        need = need_of(inventory("qwen3moe"), lane=NO_LANE).total_bytes
        assert placed("qwen3moe", fit=True, budget=need).lines == (
            f"engine: device placement: fit places nothing: {need} bytes are within the budget of {need} bytes",
        )
        for budget in (None, 0):
            assert placed("qwen3moe", UNPROBED, fit=True, budget=budget).lines == (
                "engine: device placement: fit places nothing: no memory size of cuda is known and no budget is set",
            )

    def test_streamed_experts_are_not_staged_so_none_has_to_leave(self):
        items = inventory("qwen3moe")
        streamed = Need(total_bytes=9, num_tensors=1, largest_bytes=9, largest_name="x", num_streamed=12)
        result = place(items, CARD, overrides=(), fit=True, wired=True, need=streamed, budget=1)
        assert (result.on_cpu, result.lines) == (
            (),
            ("engine: device placement: fit places nothing: the routed experts are streamed, and none is staged",),
        )


def test_a_list_that_takes_too_long_names_its_pattern():
    overrides = asked(overrides=[override("(a|b|.)*" * 100 + f"zz{n}") for n in range(256)])
    with pytest.raises(ModelLoadError, match=r'"vllm_cpp.placement.overrides\[\d+\].pattern" .* takes too long to look for'):
        placed("qwen3moe", overrides=overrides)
