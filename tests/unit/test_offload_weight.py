"""vLLM's weight offload: ranges in their order, the warning, the resolved backend, segments and layers."""

from __future__ import annotations

import math

import pytest

from vllm_cpp.config.offload import WeightOffload, parse
from vllm_cpp.config.offload.weight_offload import names_weight
from vllm_cpp.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"uva": {"cpu_offload_gb": -1}}, "cpu_offload_gb (-1.000000) must be >= 0"),
        ({"uva": {"cpu_offload_gb": math.nan}}, "cpu_offload_gb (nan) must be >= 0"),
        ({"uva": {"cpu_offload_gb": -math.inf}}, "cpu_offload_gb (-inf) must be >= 0"),
        ('{"uva":{"cpu_offload_gb":1e999}}', "cpu_offload_gb (inf) must be finite"),
        ({"uva": {"cpu_offload_gb": 10**400}}, "cpu_offload_gb (inf) must be finite"),
        ({"prefetch": {"offload_group_size": -1}}, "offload_group_size (-1) must be >= 0"),
        ({"prefetch": {"offload_num_in_group": 0}}, "offload_num_in_group (0) must be >= 1"),
        ({"prefetch": {"offload_prefetch_step": -1}}, "offload_prefetch_step (-1) must be >= 0"),
        (
            {"prefetch": {"offload_group_size": 4, "offload_num_in_group": 5}},
            "offload_num_in_group (5) must be <= offload_group_size (4)",
        ),
        (
            {"prefetch": {"offload_group_size": 4, "offload_prefetch_step": 0}},
            "offload_prefetch_step (0) must be >= 1 when prefetch offloading is enabled (offload_group_size > 0)",
        ),
        ({"offload_backend": "prefetch"}, "offload_num_in_group (1) must be <= offload_group_size (0)"),
    ],
)
def test_a_range_is_refused_in_vllms_words(document, says):
    with pytest.raises(InvalidArgumentError) as caught:
        parse(document)
    assert str(caught.value) == says


def test_ranges_are_checked_in_order():
    everything = {"cpu_offload_gb": -1.0, "group_size": -1, "num_in_group": 0, "prefetch_step": -1, "backend": "prefetch"}
    fixes = [("cpu_offload_gb", 0.0), ("group_size", 4), ("num_in_group", 5), ("prefetch_step", 0), ("num_in_group", 2)]
    named = []
    for field, value in fixes:
        with pytest.raises(InvalidArgumentError) as caught:
            WeightOffload(**everything)
        named.append(str(caught.value).split(" ")[0])
        everything[field] = value
    assert named == ["cpu_offload_gb", "offload_group_size", "offload_num_in_group", "offload_prefetch_step", "offload_num_in_group"]
    with pytest.raises(InvalidArgumentError, match="must be >= 1 when prefetch offloading is enabled"):
        WeightOffload(**everything)


def test_a_step_of_zero_is_fine_while_prefetch_is_not_enabled():
    assert WeightOffload(prefetch_step=0).resolved_backend is None


UVA_ONLY = "Prefetch offload fields are set but offload_backend='uva'. Prefetch settings will be ignored."
PREFETCH_ONLY = "UVA offload fields are set but offload_backend='prefetch'. UVA settings will be ignored."
BOTH = (
    "Both UVA and prefetch offload fields are set with offload_backend='auto'. Prefetch backend will be selected. "
    "Set offload_backend explicitly to suppress this warning."
)


@pytest.mark.parametrize(
    ("backend", "gb", "group", "resolved", "enabled", "warning"),
    [
        ("auto", 0, 0, None, False, None),
        ("auto", 1, 0, "uva", True, None),
        ("auto", 0, 2, "prefetch", True, None),
        ("auto", 1, 2, "prefetch", True, BOTH),
        ("uva", 0, 0, "uva", False, None),
        ("uva", 1, 0, "uva", True, None),
        ("uva", 0, 2, "uva", False, UVA_ONLY),
        ("uva", 1, 2, "uva", True, UVA_ONLY),
        ("prefetch", 0, 2, "prefetch", True, None),
        ("prefetch", 1, 2, "prefetch", True, PREFETCH_ONLY),
    ],
)
def test_backend_and_warning(backend, gb, group, resolved, enabled, warning):
    offload = WeightOffload(backend=backend, cpu_offload_gb=gb, group_size=group)
    assert (offload.resolved_backend, offload.enabled, offload.warning) == (resolved, enabled, warning)


@pytest.mark.parametrize(
    ("segment", "named"),
    [("experts", True), ("experts.w2_weight", True), ("w2_weight", True), ("mlp", True), ("expert", False), ("w2", False), ("", False)],
)
def test_segments_are_whole(segment, named):
    assert names_weight([segment], "mlp.experts.w2_weight") is named


def test_a_weight_does_not_name_its_scale():
    assert not names_weight(["w2_weight"], "mlp.experts.w2_weight_scale")
    assert not names_weight([], "mlp.experts.w2_weight")


def test_the_last_layers_of_each_group_are_offloaded():
    offload = WeightOffload(group_size=8, num_in_group=2)
    assert [layer for layer in range(24) if offload.offloads_layer(layer)] == [6, 7, 14, 15, 22, 23]
    assert not WeightOffload().offloads_layer(0)


def test_the_budget_truncates():
    assert WeightOffload(cpu_offload_gb=1.5).budget_bytes == 1610612736
    assert WeightOffload(cpu_offload_gb=1e-10).budget_bytes == 0
