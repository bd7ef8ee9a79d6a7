"""Building an engine from real (tiny) files: the order of refusals once a file is open, and that closing gives everything back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tiny_models
from vllm_cpp import api, env, log, models
from vllm_cpp.config.offload.install import reset
from vllm_cpp.errors import InvalidArgumentError, ModelLoadError

UVA = {"offload_backend": "uva", "uva": {"cpu_offload_gb": 1}}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in set(env.ROWS) - {"VLLM_CPP_CACHE_DIR"}:
        monkeypatch.delenv(name, raising=False)
    reset()
    log.forget()
    yield
    reset()
    log.forget()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("api") / "tiny.gguf"
    tiny_models.build("llama", dtype="F32").write(path)
    return path


@pytest.fixture
def no_weights(monkeypatch):
    def load(*_):
        raise AssertionError("weights were about to be read")

    monkeypatch.setattr(models, "load", load)


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")


def open_files(path: Path) -> list[str]:
    numbers = [entry for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return [str(number) for number in numbers if os.path.realpath(number) == str(path)]


@pytest.mark.parametrize("document", [UVA, {"prefetch": {"offload_group_size": 2}}])
def test_weight_offload_is_refused_by_architecture_before_any_weight_is_read(tiny, no_weights, document):
    with pytest.raises(ModelLoadError) as caught:
        api.load(tiny, offload_config=document)
    assert str(caught.value).startswith(
        'weight offload is configured but architecture "llama" does not support it: its loader does not consult the weight offloader, so '
        "every weight would stay on the device and the budget would free nothing. Remove --offload-config, or wire this model's loader."
    )
    assert "offloading to the CPU frees nothing" in str(caught.value)
    assert not mapped(tiny)


def test_a_budget_of_nothing_is_no_weight_offload(tiny, no_weights):
    with pytest.raises(api.InternalError, match="weights were about to be read"):
        api.load(tiny, offload_config={"offload_backend": "uva", "uva": {"cpu_offload_gb": 0}})


def test_an_unknown_architecture_is_named_before_weight_offload(tmp_path, no_weights):
    path = tmp_path / "strange.gguf"
    tiny_models.build("llama", dtype="F32").write(path)
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0llamb", 1))
    with pytest.raises(ModelLoadError, match="'llamb' is not supported"):
        api.load(path, offload_config=UVA)


def test_too_little_memory_names_the_sizes_and_what_makes_them(tiny):
    with pytest.raises(ModelLoadError) as caught:
        api.load(tiny, max_num_seqs=2**31 - 1, threads=1)
    said = str(caught.value)
    assert f"{tiny}: not enough memory to load this model: " in said
    assert f"the logits of {2**31 - 1} sequences take {(2**31 - 1) * 320 * 4} bytes" in said
    assert "num_blocks=default, max_num_seqs=2147483647, max_model_len=default, kv_cache_memory_bytes=default: lower them" in said
    assert not mapped(tiny)


def test_a_progress_callback_that_raises_ends_the_load_with_its_own_error_and_gives_everything_back(tiny):
    stages: list[str] = []
    api.load(tiny, threads=1, progress=lambda what, fraction: stages.append(what)).close()
    assert len(set(stages)) >= 4
    for number in range(len(stages)):
        calls = iter(range(len(stages)))

        def fails(what, fraction, calls=calls, number=number):
            if next(calls) == number:
                raise ZeroDivisionError(what)

        with pytest.raises(ZeroDivisionError, match=stages[number]):
            api.load(tiny, threads=1, progress=fails)
        assert not mapped(tiny)


def test_a_tokenizer_config_that_is_not_there_is_a_load_failure(tiny, no_weights):
    with pytest.raises(ModelLoadError, match="nowhere"):
        api.load(tiny, tokenizer_config_path="/nowhere/tokenizer_config.json")


class TestARealRun:
    def test_every_way_of_holding_weights_gives_the_same_tokens_and_closing_gives_all_back(self, tiny):
        answers = {}
        for name, mmap in (
            ("mapped", {"enabled": True}),
            ("copied", {"enabled": False}),
            ("not read in", {"enabled": True, "prefault": False}),
        ):
            with api.load(tiny, offload_config={"vllm_cpp": {"mmap": mmap}}, threads=1) as model:
                answers[name] = model.generate("hello", max_tokens=8, temperature=0, ignore_eos=True).token_ids
                where = "in memory" if name == "copied" else "in the file's mapping"
                assert "llama (F32 " in repr(model)
                assert f"weights {where}" in repr(model)
            assert not mapped(tiny)
            assert open_files(tiny) == []
        assert len(set(map(tuple, answers.values()))) == 1
        assert len(set(answers["mapped"])) > 1

    def test_a_placement_on_this_device_is_reported_and_the_model_runs(self, tiny, capfd):
        with api.load(tiny.parent, offload_config=json.dumps({"vllm_cpp": {"placement": {"n_cpu_moe": 2}}}), threads=1) as model:
            assert model.generate("hello", max_tokens=2, ignore_eos=True).completion_tokens == 2
        said = capfd.readouterr().err
        assert "engine: device placement: 2 override(s) resolve(s) to the engine's own device (cpu), so nothing is placed\n" in said

    def test_streaming_cannot_be_turned_on_once_a_model_ran_without(self, tiny):
        api.load(tiny, threads=1).close()
        with pytest.raises(ModelLoadError, match=r"expert_stream cannot be changed .*expert_stream=off"):
            api.load(tiny, offload_config={"vllm_cpp": {"expert_stream": {"enabled": True}}})

    def test_a_cache_below_one_block_is_the_callers_mistake(self, tiny):
        with pytest.raises(InvalidArgumentError, match="kv_cache_memory_bytes"):
            api.load(tiny, kv_cache_memory_bytes=1)
        with pytest.raises(InvalidArgumentError, match="kv_cache_memory_bytes"):
            api.load(tiny, kv_cache_memory_bytes=1, num_blocks=8)
        assert not mapped(tiny)

    @pytest.mark.parametrize(("num_blocks", "lines"), [(8, 1), (64, 0)])
    def test_blocks_win_over_bytes_and_that_is_said(self, tiny, capfd, num_blocks, lines):
        with api.load(tiny, num_blocks=64, threads=1) as model:
            layouts = model._engine._runner._builder.kv_layouts
            n_bytes = 64 * sum(layout.block_bytes for layout in layouts)
        with api.load(tiny, kv_cache_memory_bytes=n_bytes, num_blocks=num_blocks, threads=1) as model:
            assert model._engine._runner.num_blocks == num_blocks
        text = f"num_blocks=8 sets the size of the KV cache ({n_bytes // 8} bytes); kv_cache_memory_bytes={n_bytes}, which would pay for 64"
        assert capfd.readouterr().err.count(text) == lines

    @pytest.mark.parametrize("sizes", [{"num_blocks": 2**31 - 1}, {"num_blocks": 2**31 - 1, "block_size": 2**31 - 16}])
    def test_a_cache_beyond_memory_is_refused_as_such(self, tiny, sizes):
        with pytest.raises(ModelLoadError, match=r"not enough memory for 2147483647 KV blocks of \d+ tokens, which take \d+ bytes; lower"):
            api.load(tiny, **sizes)
        assert not mapped(tiny)
