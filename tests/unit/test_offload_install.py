"""Installing documents: merge, freeze, precedence over the environment, and the start-up lines."""

from __future__ import annotations

import os
import threading

import pytest

from vllm_cpp import env, log
from vllm_cpp.config.offload import (
    Override,
    Residency,
    decide,
    freeze_expert_stream,
    freeze_geometry,
    install,
    parse,
    preview,
    resolve,
)
from vllm_cpp.config.offload.install import _state, reset
from vllm_cpp.errors import ModelLoadError

CPU_MOE = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in env.ROWS:
        monkeypatch.delenv(name, raising=False)
    reset()
    log.forget()
    yield
    reset()
    log.forget()


def document(**groups):
    return parse({"vllm_cpp": groups})


def test_defaults():
    assert install(parse(None)) == Residency() == resolve()
    assert Residency().expert_stream_slots == 64
    assert Residency().expert_stream_stats_every == 16


def test_a_later_document_is_merged_field_by_field():
    install(document(mmap={"enabled": False}, expert_stream={"slots": 9}, placement={"cpu_moe": True, "n_cpu_moe": 2}))
    residency = install(document(mmap={"prefault": False}, placement={"n_cpu_moe": 0, "overrides": [{"pattern": "a", "device": "cpu"}]}))
    assert (residency.mmap, residency.prefault, residency.expert_stream_slots) == (False, False, 9)
    assert residency.placement == (Override("a", "cpu"), Override(CPU_MOE, "cpu"))
    assert install(document(placement={"overrides": []})).placement == (Override(CPU_MOE, "cpu"),)
    assert _state.request.mmap is False


@pytest.mark.parametrize(
    ("groups", "variable", "text", "field", "value"),
    [
        ({"mmap": {"enabled": True}}, "VT_GGUF_MMAP", "off", "mmap", False),
        ({"mmap": {"enabled": False}}, "VT_GGUF_MMAP", "1", "mmap", True),
        ({"mmap": {"prefault": True}}, "VT_GGUF_PREFAULT", "", "prefault", False),
        ({"expert_stream": {"enabled": True}}, "VT_MOE_EXPERT_STREAM", "0", "expert_stream", False),
        ({"expert_stream": {"enabled": True}}, "VT_MOE_EXPERT_STREAM", "false", "expert_stream", False),
        ({"expert_stream": {"slots": 5}}, "VT_MOE_EXPERT_STREAM_SLOTS", "7", "expert_stream_slots", 7),
        ({"expert_stream": {"slots": 5}}, "VT_MOE_EXPERT_STREAM_SLOTS", "banana", "expert_stream_slots", 5),
        ({"expert_stream": {"slots": 5}}, "VT_MOE_EXPERT_STREAM_SLOTS", "0", "expert_stream_slots", 5),
        ({"expert_stream": {"slot_bytes": 5}}, "VT_MOE_EXPERT_STREAM_SLOT_BYTES", "8", "expert_stream_slot_bytes", 8),
        ({"device_fit": {"weight_budget_bytes": 5}}, "VT_DEVICE_WEIGHT_BUDGET_BYTES", "0", "device_weight_budget_bytes", 0),
        ({"device_fit": {"weight_budget_bytes": 5}}, "VT_DEVICE_WEIGHT_BUDGET_BYTES", "+9", "device_weight_budget_bytes", 5),
        ({"placement": {"cpu_moe": True}}, "VT_CPU_MOE", "no", "placement", ()),
        ({"placement": {"n_cpu_moe": 3}}, "VT_N_CPU_MOE", "0", "placement", ()),
        ({"placement": {"n_cpu_moe": 1}}, "VT_N_CPU_MOE", "9999", "placement", (Override(rf"blk\.0{CPU_MOE}", "cpu"),)),
        ({"placement": {"overrides": []}}, "VT_PLACEMENT_OVERRIDES", "a=b=cpu", "placement", ()),
        (
            {"placement": {"overrides": []}},
            "VT_PLACEMENT_OVERRIDES",
            "a=cpu,b=cpu",
            "placement",
            (Override("a", "cpu"), Override("b", "cpu")),
        ),
        ({"placement": {"overrides": []}}, "VT_PLACEMENT_OVERRIDES", "a=cpu,b", "placement", ()),
        ({"placement": {"overrides": []}}, "VT_PLACEMENT_OVERRIDES", "(=cpu", "placement", ()),
        ({"placement": {"overrides": []}}, "VT_PLACEMENT_OVERRIDES", "a=tpu", "placement", ()),
        ({"placement": {"fit": True}}, "VT_PLACEMENT_FIT", "0", "placement_fit", False),
    ],
)
def test_environment_over_document(monkeypatch, groups, variable, text, field, value):
    monkeypatch.setenv(variable, text)
    assert getattr(install(document(**groups)), field) == value


def test_an_override_splits_at_the_first_equals_sign(monkeypatch):
    monkeypatch.setenv("VT_PLACEMENT_OVERRIDES", "a=cpu")
    assert resolve().placement == (Override("a", "cpu"),)


@pytest.mark.parametrize(("text", "every"), [("0", 0), ("5", 5), ("banana", 16), ("-1", 16)])
def test_the_interval_of_the_statistics_line(monkeypatch, text, every):
    monkeypatch.setenv("VT_MOE_EXPERT_STREAM_STATS_EVERY", text)
    assert resolve().expert_stream_stats_every == every


def test_line_one_and_two(monkeypatch, capfd):
    monkeypatch.setenv("VT_MOE_EXPERT_STREAM", "0")
    monkeypatch.setenv("VT_MOE_EXPERT_STREAM_SLOTS", "banana")
    monkeypatch.setenv("VT_GGUF_PREFAULT", "1")
    for _ in range(2):
        install(document(mmap={"enabled": True, "prefault": False}, expert_stream={"enabled": True, "slots": 4000}))
    assert capfd.readouterr().err == (
        "engine: weight residency (offload_config vllm_cpp): mmap=on prefault=off expert_stream=on expert_stream_slots=4000\n"
        "engine: weight residency: the environment OVERRIDES the config for "
        "VT_GGUF_PREFAULT (prefault), VT_MOE_EXPERT_STREAM (expert_stream)\n"
    )


def test_a_preview_changes_and_says_nothing(capfd):
    install(document(expert_stream={"slots": 9}))
    capfd.readouterr()
    looked_at = preview(document(mmap={"enabled": False}, placement={"cpu_moe": True}))
    assert (looked_at.mmap, looked_at.expert_stream_slots, len(looked_at.placement)) == (False, 9, 1)
    assert (resolve().mmap, resolve().placement) == (True, ())
    assert capfd.readouterr().err == ""
    freeze_expert_stream(False)
    with pytest.raises(ModelLoadError, match="expert_stream cannot be changed"):
        preview(document(expert_stream={"enabled": True}))


def test_a_document_without_the_vllm_cpp_half_says_nothing(monkeypatch, capfd):
    monkeypatch.setenv("VT_GGUF_MMAP", "0")
    install(parse({"uva": {"cpu_offload_gb": 1}}))
    install(parse("{}"))
    assert capfd.readouterr().err == ""


def test_line_one_is_what_this_document_asked_for_not_what_was_asked_before(capfd):
    install(document(mmap={"enabled": False}))
    capfd.readouterr()
    install(document(expert_stream={"slots": 3}))
    assert capfd.readouterr().err == "engine: weight residency (offload_config vllm_cpp): expert_stream_slots=3\n"


def test_a_backend_that_disagrees_is_warned_about_once(capfd):
    for _ in range(2):
        install(parse({"offload_backend": "uva", "prefetch": {"offload_group_size": 2}}))
    assert capfd.readouterr().err == (
        "[vllm.cpp] offload_config: Prefetch offload fields are set but offload_backend='uva'. Prefetch settings will be ignored.\n"
    )


def test_a_refused_document_leaves_no_trace(monkeypatch, capfd):
    monkeypatch.setenv("VT_PLACEMENT_FIT", "1")
    with pytest.raises(ModelLoadError, match="cannot be combined with a manual placement"):
        install(document(mmap={"enabled": False}, placement={"cpu_moe": True}))
    monkeypatch.delenv("VT_PLACEMENT_FIT")
    assert capfd.readouterr().err == ""
    assert install(parse(None)) == Residency()


@pytest.mark.parametrize("source", ["document", "variable"])
def test_streaming_is_turned_on_by_either(monkeypatch, source):
    if source == "variable":
        monkeypatch.setenv("VT_MOE_EXPERT_STREAM", "1")
    assert install(document(expert_stream={"enabled": True}) if source == "document" else parse(None)).expert_stream is True


def test_expanding_weights_is_asked_for_by_two_variables(monkeypatch):
    assert install(parse(None)).expand == ""
    monkeypatch.setenv("VT_GGUF_KEEP_QUANT", "0")
    assert (install(parse(None)).expand, install(parse(None)).reference) == ("VT_GGUF_KEEP_QUANT=0", False)
    monkeypatch.setenv("VT_CPU_REF", "1")
    assert (install(parse(None)).expand, install(parse(None)).reference) == ("VT_CPU_REF=1", True)
    monkeypatch.setenv("VT_CPU_REF", "off")
    monkeypatch.setenv("VT_GGUF_KEEP_QUANT", "1")
    assert install(parse(None)).expand == ""


def test_fit_and_a_manual_placement_from_two_sources_are_refused(monkeypatch):
    install(document(placement={"fit": True}))
    with pytest.raises(ModelLoadError, match="cannot be combined with a manual placement"):
        install(document(placement={"cpu_moe": True}))
    assert _state.request.cpu_moe is None
    assert install(document(placement={"cpu_moe": True, "fit": False})).placement
    monkeypatch.setenv("VT_PLACEMENT_FIT", "1")
    with pytest.raises(ModelLoadError, match="cannot be combined"):
        install(parse(None))


class TestFreeze:
    def test_streaming_freezes_with_its_first_use(self):
        freeze_expert_stream(False)
        with pytest.raises(ModelLoadError, match=r"expert_stream cannot be changed .*in force: expert_stream=off"):
            install(document(expert_stream={"enabled": True}))
        install(document(expert_stream={"enabled": False}))
        install(document(mmap={"enabled": False, "prefault": False}, device_fit={"weight_budget_bytes": 1}, placement={"cpu_moe": True}))
        assert resolve().mmap is False

    def test_the_first_use_decides_for_good(self):
        freeze_expert_stream(False)
        freeze_expert_stream(True)
        assert resolve().expert_stream is False

    def test_a_model_that_was_overtaken_goes_along_unless_its_document_asked(self):
        asked = Residency(expert_stream=True)
        freeze_expert_stream(False)
        assert decide(document(mmap={"enabled": True}), asked).expert_stream is False
        with pytest.raises(ModelLoadError, match="in force: expert_stream=off"):
            decide(document(expert_stream={"enabled": True}), asked)

    def test_a_document_that_the_environment_overrules_is_no_change(self, monkeypatch):
        freeze_expert_stream(False)
        monkeypatch.setenv("VT_MOE_EXPERT_STREAM", "0")
        install(document(expert_stream={"enabled": True}))
        monkeypatch.setenv("VT_MOE_EXPERT_STREAM", "1")
        with pytest.raises(ModelLoadError, match="expert_stream cannot be changed"):
            install(document(expert_stream={"enabled": False}))

    def test_the_geometry_freezes_when_the_store_is_built(self, monkeypatch):
        install(document(expert_stream={"slots": 10}))
        install(document(expert_stream={"slots": 11}))
        freeze_geometry(11, 4096)
        install(document(expert_stream={"slots": 11, "slot_bytes": 4096}))
        with pytest.raises(ModelLoadError, match=r"expert_stream_slots cannot be changed .*in force: expert_stream_slots=11"):
            install(document(expert_stream={"slots": 12}))
        with pytest.raises(ModelLoadError, match=r"expert_stream_slot_bytes cannot be changed .*=4096"):
            install(document(expert_stream={"slot_bytes": 1}))
        monkeypatch.setenv("VT_MOE_EXPERT_STREAM_SLOTS", "11")
        install(document(expert_stream={"slots": 12}))
        assert (resolve().expert_stream_slots, resolve().expert_stream_slot_bytes) == (11, 4096)

    def test_a_refused_document_changes_nothing(self):
        freeze_expert_stream(False)
        with pytest.raises(ModelLoadError):
            install(document(mmap={"enabled": False}, expert_stream={"enabled": True}))
        assert resolve().mmap is True


def test_a_forked_child_does_not_wait_for_the_reading_threads_of_its_parent(monkeypatch):
    streams = document(expert_stream={"enabled": True})
    decide(streams, install(streams))
    freeze_geometry(64, 4096)
    assert decide(streams, install(streams)).expert_stream
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(ModelLoadError, match="threads of the process this one was forked from"):
        decide(streams, install(streams))
    with pytest.raises(ModelLoadError, match="threads of the process this one was forked from"):
        decide(parse(None), install(parse(None)))


def test_documents_installed_by_many_threads_are_all_there():
    groups = [
        {"mmap": {"enabled": False}},
        {"mmap": {"prefault": False}},
        {"expert_stream": {"slots": 7}},
        {"expert_stream": {"slot_bytes": 9}},
        {"device_fit": {"weight_budget_bytes": 3}},
        {"placement": {"n_cpu_moe": 1}},
    ]
    threads = [threading.Thread(target=lambda g=g: [install(document(**g)) for _ in range(50)]) for g in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _state.request.described() == (
        "mmap=off prefault=off expert_stream_slots=7 expert_stream_slot_bytes=9 device_weight_budget_bytes=3 n_cpu_moe=1"
    )
