"""Engine parameters: the twin of vllm_model_params, its defaults and the order of its refusals."""

from __future__ import annotations

import math

import pytest

from vllm_cpp import env, log
from vllm_cpp.config import cpus
from vllm_cpp.config.engine import EngineParams, device_name, refuse_what_is_not_built, tri_state, warn_of_what_sizes_nothing
from vllm_cpp.errors import InvalidArgumentError, ModelLoadError, UnknownKeywordError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in env.ROWS:
        monkeypatch.delenv(name, raising=False)
    log.forget()


def test_defaults():
    params = EngineParams(model_path="m.gguf")
    assert (params.block_size, params.num_blocks, params.max_model_len, params.max_num_seqs) == (32, 0, 0, 32)
    assert (params.device, params.scheduling_policy, params.gpu_memory_utilization) == ("auto", "fcfs", 0.92)
    assert params.num_threads >= 1
    refuse_what_is_not_built(params)


def test_zero_means_the_default():
    params = EngineParams(model_path="m", block_size=0, max_num_seqs=0, scheduling_policy="", kv_cache_memory_bytes=0, tool_parser="")
    assert (params.block_size, params.max_num_seqs, params.scheduling_policy) == (32, 8, "fcfs")
    assert params.kv_cache_memory_bytes is None
    assert EngineParams(model_path="m", kv_cache_dtype="").kv_cache_dtype == "f16"
    assert params.tool_parser is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_path", ""),
        ("model_path", None),
        ("block_size", 24),
        ("block_size", -16),
        ("num_blocks", -1),
        ("max_model_len", 2.5),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", 2**31),
        ("scheduling_policy", "lifo"),
        ("device", "tpu"),
        ("device", None),
        ("enable_prefix_caching", 1),
        ("enable_jump_forward", "on"),
        ("language_model_only", 1),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", math.nan),
        ("kv_cache_memory_bytes", -1),
        ("kv_cache_dtype", "q4_0"),
        ("kv_cache_dtype", 16),
        ("threads", -1),
        ("threads", 5000),
        ("speculative_config", "{"),
        ("speculative_config", "[]"),
        ("kv_transfer_config", 3),
        ("kv_transfer_config", {"kv_connector": "x"}),
        ("speculative_config", {"method": "no-such-method"}),
        ("limit_mm_per_prompt", {"image": -1}),
        ("limit_mm_per_prompt", '{"image": "many"}'),
    ],
)
def test_a_wrong_value_is_an_invalid_argument_named_by_its_field(field, value):
    with pytest.raises(InvalidArgumentError, match=field):
        EngineParams(**{"model_path": "m", field: value})


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("device", "cuda", "no CUDA back end in this build"),
        ("speculative_config", '{"method":"mtp"}', "speculative_config"),
        ("kv_transfer_config", {"kv_role": "kv_both"}, "kv_transfer_config"),
        ("scheduling_policy", "priority", "priority"),
        ("scheduling_policy", "lpm", "lpm"),
        ("enable_jump_forward", True, "jump-forward"),
    ],
)
def test_what_is_not_built_is_a_load_failure_named_by_its_field(field, value, text):
    params = EngineParams(**{"model_path": "m", field: value})
    with pytest.raises(ModelLoadError, match=text):
        refuse_what_is_not_built(params)


def test_the_device_is_refused_before_any_feature():
    params = EngineParams(model_path="m", device="cuda", speculative_config='{"method":"mtp"}')
    with pytest.raises(ModelLoadError, match="CUDA"):
        refuse_what_is_not_built(params)


@pytest.mark.parametrize("empty", ["", "  ", "{}", None])
def test_an_empty_document_is_none(empty):
    params = EngineParams(model_path="m", speculative_config=empty, kv_transfer_config=empty, limit_mm_per_prompt=empty)
    refuse_what_is_not_built(params)


def test_the_jump_forward_variable_wins_both_ways(monkeypatch):
    monkeypatch.setenv("VT_ENABLE_JUMP_FORWARD", "0")
    refuse_what_is_not_built(EngineParams(model_path="m", enable_jump_forward=True))
    monkeypatch.setenv("VT_ENABLE_JUMP_FORWARD", "1")
    with pytest.raises(ModelLoadError, match="VT_ENABLE_JUMP_FORWARD"):
        refuse_what_is_not_built(EngineParams(model_path="m", enable_jump_forward=False))


def test_c_numbers():
    assert [tri_state("enable_prefix_caching", n) for n in range(3)] == [None, True, False]
    assert [device_name(n) for n in range(3)] == ["auto", "cpu", "cuda"]
    for wrong in (-1, 3):
        with pytest.raises(InvalidArgumentError, match="enable_prefix_caching"):
            tri_state("enable_prefix_caching", wrong)
        with pytest.raises(InvalidArgumentError, match="device"):
            device_name(wrong)


def test_threads_parameter_then_variable_then_cores(monkeypatch):
    monkeypatch.setattr("vllm_cpp.config.engine.physical_cores", lambda: 5)
    assert EngineParams(model_path="m").num_threads == 5
    monkeypatch.setenv("VLLM_CPP_CPU_THREADS", "3")
    assert EngineParams(model_path="m").num_threads == 3
    assert EngineParams(model_path="m", threads=2).num_threads == 2
    monkeypatch.setenv("VLLM_CPP_CPU_THREADS", "many")
    assert EngineParams(model_path="m").num_threads == 5


def test_physical_cores_count_siblings_once_and_obey_the_quota(monkeypatch):
    files = {cpus._TOPOLOGY.format(cpu): f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    monkeypatch.setattr(cpus, "_allowed_cpus", lambda: set(range(8)))
    monkeypatch.setattr(cpus, "_read", lambda path: files.get(path, ""))
    assert cpus.physical_cores() == 4
    files[cpus._QUOTA_V2] = "250000 100000"
    assert cpus.physical_cores() == 2
    files[cpus._QUOTA_V2] = "max 100000"
    assert cpus.physical_cores() == 4
    del files[cpus._QUOTA_V2]
    files.update(zip(cpus._QUOTA_V1, ("50000", "100000"), strict=True))
    assert cpus.physical_cores() == 1


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(UnknownKeywordError, match="EngineParams has no parameter 'max_seqs'; did you mean 'max_num_seqs'"):
        EngineParams(model_path="m", max_seqs=2)


def test_a_context_must_have_room_for_a_prompt_and_an_answer():
    assert EngineParams(model_path="m", max_model_len=2).max_model_len == 2
    with pytest.raises(InvalidArgumentError, match="max_model_len must be at least 2"):
        EngineParams(model_path="m", max_model_len=1)


def test_a_fraction_of_memory_that_sizes_nothing_is_said_once(capfd):
    for _ in range(2):
        warn_of_what_sizes_nothing(EngineParams(model_path="m"))
    assert capfd.readouterr().err.count("gpu_memory_utilization=0.92 sizes nothing") == 1
    log.forget()
    warn_of_what_sizes_nothing(EngineParams(model_path="m", gpu_memory_utilization=0.0))
    warn_of_what_sizes_nothing(EngineParams(model_path="m", num_blocks=7))
    warn_of_what_sizes_nothing(EngineParams(model_path="m", kv_cache_memory_bytes=1 << 20))
    assert capfd.readouterr().err == ""
