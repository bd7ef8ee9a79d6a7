"""Loading on devices that this build does not have: placement, fit and weight offload are decided before a weight is read, or right after.

The device is made up and the CPU computes; what is tested is the order of things and what a user is told.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

import tiny_models
from inventories import CARD, INTEGRATED
from vllm_cpp import api, env, log, models
from vllm_cpp.cli import arguments, plan
from vllm_cpp.config.offload.install import reset
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.models import registry
from vllm_cpp.residency import devices


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in set(env.ROWS) - {"VLLM_CPP_CACHE_DIR"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(api, "engine_device", lambda params: CARD)
    reset()
    log.forget()
    yield
    reset()
    log.forget()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("devices") / "tiny.gguf"
    tiny_models.build("qwen3moe", dtype="F32").write(path)
    return path


@pytest.fixture
def no_weights(monkeypatch):
    def load(*_):
        raise AssertionError("weights were about to be read")

    monkeypatch.setattr(models, "load", load)


def mapped(path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")


def placement(**keys):
    return {"vllm_cpp": {"placement": keys}}


def test_a_placement_is_installed_and_said_once(tiny, capfd):
    for _ in range(2):
        with api.load(tiny, offload_config=placement(n_cpu_moe=1), threads=1) as model:
            assert model.generate("a", max_tokens=1).completion_tokens == 1
            assert " on cuda, weights" in repr(model)
    said = capfd.readouterr().err
    line = r"engine: device placement INSTALLED: 1 layers run their routed experts on cpu, the rest on cuda \(resolved against \d+ layers, "
    assert len(re.findall(line + r"origin stated\)\n", said)) == 1
    assert said.count("a CPU placement is active while the weights are mmap-resident") == 1


@pytest.mark.parametrize("source", ["document", "variable"])
@pytest.mark.parametrize(("device", "mmap", "is_said"), [(CARD, "1", True), (CARD, "0", False), (devices.CPU, "1", False)])
def test_only_a_placement_that_places_is_said_to_be_read_through_the_mapping(tiny, capfd, monkeypatch, source, device, mmap, is_said):
    monkeypatch.setattr(api, "engine_device", lambda params: device)
    monkeypatch.setenv("VT_GGUF_MMAP", mmap)
    if source == "variable":
        monkeypatch.setenv("VT_CPU_MOE", "1")
    api.load(tiny, offload_config=placement(cpu_moe=True) if source == "document" else None, threads=1).close()
    said = capfd.readouterr().err
    assert ("a CPU placement is active while the weights are mmap-resident" in said) is is_said
    assert ("so nothing is placed" in said) is (device is devices.CPU)


def test_a_variable_that_acts_on_nothing_here_is_said_once(tiny, capfd, monkeypatch):
    api.load(tiny, threads=1).close()
    assert "VT_QWEN35_ALIAS_HOST_WEIGHTS" not in capfd.readouterr().err
    monkeypatch.setenv("VT_QWEN35_ALIAS_HOST_WEIGHTS", "0")
    for _ in range(2):
        api.load(tiny, threads=1).close()
    assert capfd.readouterr().err.count("VT_QWEN35_ALIAS_HOST_WEIGHTS is set and has no effect") == 1


def test_a_placement_that_cannot_be_honoured_is_refused_before_any_weight_is_read(tiny, no_weights):
    with pytest.raises(ModelLoadError, match="the placement splits the routed experts of layer 0"):
        api.load(tiny, offload_config=placement(overrides=[{"pattern": "up_exps", "device": "cpu"}]))
    assert not mapped(tiny)


def test_a_family_that_is_not_wired_is_refused(tmp_path, no_weights, monkeypatch):
    tiny_models.build("olmoe", dtype="F32").write(tmp_path / "olmoe.gguf")
    monkeypatch.setitem(registry._FAMILIES, "olmoe", dataclasses.replace(registry.find("olmoe"), places_experts=False))
    with pytest.raises(ModelLoadError, match='architecture "olmoe" does not honour it'):
        api.load(tmp_path / "olmoe.gguf", offload_config=placement(cpu_moe=True))


class TestFit:
    @pytest.mark.parametrize("source", ["document", "variable"])
    def test_weights_beyond_the_budget_are_refused_before_any_is_read(self, tiny, no_weights, monkeypatch, source):
        if source == "variable":
            monkeypatch.setenv("VT_DEVICE_WEIGHT_BUDGET_BYTES", "1000")
        document = {"vllm_cpp": {"device_fit": {"weight_budget_bytes": 1000 if source == "document" else 0}}}
        with pytest.raises(ModelLoadError, match=r"^device 'cuda' cannot serve this GGUF: staging its weights needs at least \d+ bytes"):
            api.load(tiny, offload_config=document)
        assert not mapped(tiny)

    def test_it_is_refused_by_the_probe_and_suppressed_by_zero(self, tiny, monkeypatch):
        monkeypatch.setattr(api, "engine_device", lambda params: dataclasses.replace(CARD, total_bytes=1000))
        with pytest.raises(ModelLoadError, match=r"this device's memory pool is 1000 bytes \(0\.00 GiB\)"):
            api.load(tiny)
        api.load(tiny, offload_config={"vllm_cpp": {"device_fit": {"weight_budget_bytes": 0}}}, threads=1).close()

    def test_the_missing_part_names_what_is_missing(self, tiny, no_weights, monkeypatch):
        monkeypatch.setattr(api, "engine_device", lambda params: INTEGRATED)
        monkeypatch.setenv("VT_DEVICE_WEIGHT_BUDGET_BYTES", "1000")
        with pytest.raises(ModelLoadError, match=r"lane: 'blk\.0\.ffn_gate_exps\.weight' is F32, which is not kept in the file's form"):
            api.load(tiny)

    def test_placed_layers_make_room_by_themselves_or_as_far_as_is_needed(self, tiny, capfd, monkeypatch):
        with pytest.raises(ModelLoadError) as caught:
            api.load(tiny, offload_config={"vllm_cpp": {"device_fit": {"weight_budget_bytes": 1}}})
        need = int(re.search(r"needs at least (\d+) bytes", str(caught.value))[1])
        monkeypatch.setenv("VT_DEVICE_WEIGHT_BUDGET_BYTES", str(need - 1))
        with pytest.raises(ModelLoadError, match="cannot serve"):
            api.load(tiny)
        api.load(tiny, offload_config=placement(cpu_moe=True), threads=1).close()
        api.load(tiny, offload_config=placement(cpu_moe=False, fit=True), threads=1).close()
        capfd.readouterr()
        log.forget()
        api.load(tiny, threads=1).close()  # fit stands
        said = capfd.readouterr().err
        assert "1 layers run their routed experts on cpu, the rest on cuda" in said
        assert "a CPU placement is active while the weights are mmap-resident" in said


UVA = {"uva": {"cpu_offload_gb": 1}}


class TestWeightOffload:
    @pytest.fixture
    def claims(self, monkeypatch):
        family = registry.find("qwen3moe")
        monkeypatch.setitem(registry._FAMILIES, "qwen3moe", dataclasses.replace(family, consults_weight_offloader=True))

    def test_a_loader_that_does_not_ask_is_refused_before_any_weight_is_read(self, tiny, no_weights):
        with pytest.raises(ModelLoadError, match='weight offload is configured but architecture "qwen3moe" does not support it') as caught:
            api.load(tiny, offload_config=UVA)
        assert "CPU" not in str(caught.value)

    def test_a_loader_that_claims_to_ask_and_does_not_is_refused_after_it_loaded(self, tiny, claims):
        with pytest.raises(ModelLoadError, match="consulted the offloader about no weight"):
            api.load(tiny, offload_config=UVA, threads=1)
        assert not mapped(tiny)

    def test_on_the_cpu_it_frees_nothing(self, tiny, claims, no_weights, monkeypatch):
        monkeypatch.setattr(api, "engine_device", lambda params: devices.CPU)
        with pytest.raises(ModelLoadError, match="offloading to the CPU frees nothing"):
            api.load(tiny, offload_config=UVA)


class TestPlan:
    def shown(self, tiny, capfd, *flags, **groups) -> tuple[int, str]:
        code = plan.show(arguments.parse(["--model", str(tiny), "--plan", *flags]), {"vllm_cpp": groups}, {})
        return code, capfd.readouterr().out

    def test_what_is_staged_and_what_is_computed_where(self, tiny, capfd):
        code, out = self.shown(tiny, capfd, placement={"n_cpu_moe": 1})
        assert code == 0
        assert re.search(r"^staged +\d+ bytes \(0\.00 GiB\) in \d+ tensors$", out, re.MULTILINE)
        assert re.search(r"^budget +25769803776 bytes \(24\.00 GiB\)$", out, re.MULTILINE)
        assert re.search(r"^slot lane +off: cuda cannot read host memory in place$", out, re.MULTILINE)
        assert re.search(r"^placement +INSTALLED: 1 layers run their routed experts on cpu, the rest on cuda \(resolved", out, re.MULTILINE)
        assert re.search(r"^ +0  experts +\d+  mapping +cpu$", out, re.MULTILINE)
        assert re.search(r"^ +1  experts +\d+  cuda memory +cuda$", out, re.MULTILINE)

    def test_a_refusal_is_part_of_the_plan_and_of_the_exit_code(self, tiny, capfd):
        code, out = self.shown(tiny, capfd, device_fit={"weight_budget_bytes": 1000})
        assert code == 1
        assert re.search(r"^REFUSED +device 'cuda' cannot serve this GGUF: ", out, re.MULTILINE)
        code, out = self.shown(tiny, capfd, "--json", device_fit={"weight_budget_bytes": 1000}, placement={"cpu_moe": True})
        facts = json.loads(out)
        assert (code, facts["budget_bytes"], facts["device"]) == (1, 1000, "cuda")
        assert facts["placed_layers"] == list(range(facts["layers"]))
        assert 1000 < facts["staged_bytes"] < facts["file_bytes"]
