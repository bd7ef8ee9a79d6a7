"""The Python door: what `load` refuses and in which order, and every method of `LLM` over a fake model."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

import vllm_cpp
from fakes import decoded, models
from vllm_cpp import api, env, log
from vllm_cpp.config.offload.install import reset
from vllm_cpp.errors import GenerationError, InternalError, InvalidArgumentError, ModelLoadError, UnknownKeywordError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in env.ROWS:
        monkeypatch.delenv(name, raising=False)
    reset()
    log.forget()
    yield
    reset()
    log.forget()


@pytest.fixture
def llm(monkeypatch):
    monkeypatch.setattr(api, "build_engine", models.build)
    with api.load("fake.gguf") as model:
        yield model


@pytest.fixture
def endless(monkeypatch):
    """A model whose steps take a while, so that a request is surely still running."""

    def build(params, progress=None):
        engine = models.build(params, progress)
        engine._runner.before_run = lambda chunks: time.sleep(0.002)
        return engine

    monkeypatch.setattr(api, "build_engine", build)
    with api.load("fake.gguf") as model:
        yield model


@pytest.fixture
def held(monkeypatch):
    """A model that stops after twenty steps, in the middle of a request, until the event is set."""
    goes_on = threading.Event()

    def build(params, progress=None):
        engine = models.build(params, progress)
        engine._runner.before_run = lambda chunks: len(engine._runner.batches) < 20 or goes_on.wait()
        return engine

    monkeypatch.setattr(api, "build_engine", build)
    model = api.load("fake.gguf")
    yield model, goes_on
    goes_on.set()
    model.close()


def running(model) -> int:
    return model.stats()["requests_running"] + model.stats()["requests_waiting"]


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


class TestImport:
    def test_importing_the_package_imports_nothing_heavy(self):
        code = (
            "import sys, vllm_cpp; vllm_cpp.load, vllm_cpp.SamplingParams, vllm_cpp.LLM; "
            "print(sorted({'numba', 'numpy', 'jinja2', 'tokenizers'} & set(sys.modules)))"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "engine")}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"
        assert done.stderr == ""

    def test_every_public_name_is_there(self):
        for name in vllm_cpp.__all__:
            assert getattr(vllm_cpp, name) is not None
        assert set(vllm_cpp.__all__) <= set(dir(vllm_cpp))
        with pytest.raises(AttributeError, match="no attribute 'loud'"):
            vllm_cpp.loud  # noqa: B018 - the access is the test

    def test_the_version_is_the_package_s(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert vllm_cpp.__version__ == project["version"]


class TestOrderOfRefusals:
    """Documents and enums, then the device, then the path; nothing is opened before."""

    MISSING = "/nonexistent/model.gguf"

    def test_a_document_before_the_device_before_the_path(self):
        with pytest.raises(InvalidArgumentError, match="unknown key"):
            api.load(self.MISSING, device="cuda", offload_config='{"vllm-cpp":{}}')
        with pytest.raises(InvalidArgumentError, match="device"):
            api.load(self.MISSING, device="tpu")
        with pytest.raises(ModelLoadError, match="no CUDA back end in this build"):
            api.load(self.MISSING, device="cuda")
        with pytest.raises(ModelLoadError, match="no such file"):
            api.load(self.MISSING)

    def test_a_refused_device_installs_no_document(self, capfd):
        with pytest.raises(ModelLoadError):
            api.load(self.MISSING, device="cuda", offload_config={"vllm_cpp": {"mmap": {"enabled": False}}})
        assert capfd.readouterr().err == ""

    def test_the_document_is_installed_and_said_before_the_path_is_looked_at(self, capfd):
        with pytest.raises(ModelLoadError, match="no such file"):
            api.load(self.MISSING, offload_config={"vllm_cpp": {"mmap": {"enabled": True, "prefault": False}}})
        assert "engine: weight residency (offload_config vllm_cpp): mmap=on prefault=off\n" in capfd.readouterr().err

    def test_keywords(self):
        with pytest.raises(UnknownKeywordError, match="load has no parameter 'max_modellen'; did you mean 'max_model_len'"):
            api.load(self.MISSING, max_modellen=5)
        with pytest.raises(UnknownKeywordError, match="model_path"):
            api.load(self.MISSING, model_path="other.gguf")
        with pytest.raises(InvalidArgumentError, match="load takes the path of a model"):
            api.load(3)

    def test_a_fraction_that_nobody_stated_is_not_warned_about(self, capfd):
        with pytest.raises(ModelLoadError):
            api.load(self.MISSING)
        assert capfd.readouterr().err == ""
        with pytest.raises(ModelLoadError):
            api.load(self.MISSING, gpu_memory_utilization=0.5)
        assert "gpu_memory_utilization=0.5 sizes nothing" in capfd.readouterr().err

    def test_a_mistake_of_ours_is_still_an_error_of_ours(self, monkeypatch):
        monkeypatch.setattr(api, "_build", lambda params, progress: {}["no"])
        with pytest.raises(InternalError, match="KeyError"):
            api.load("x.gguf")

    @pytest.mark.parametrize("progress", [3, "loud"])
    def test_progress_must_be_callable(self, progress):
        with pytest.raises(InvalidArgumentError, match="progress must be callable"):
            api.load(self.MISSING, progress=progress)

    @pytest.mark.parametrize("error", [ZeroDivisionError("mine"), MemoryError("mine"), OSError("mine"), KeyboardInterrupt()])
    def test_what_a_progress_callback_raises_is_the_caller_s(self, error):
        def fails(what, fraction):
            raise error

        with pytest.raises(type(error)) as caught:
            api.load(self.MISSING, progress=fails)
        assert caught.value is error

    @pytest.mark.parametrize("door", [api.load, api.plan])
    def test_a_keyword_without_a_value_is_still_one_that_must_be_known(self, door):
        with pytest.raises(UnknownKeywordError, match=f"{door.__name__} has no parameter 'max_seqs'"):
            door(self.MISSING, max_seqs=None)


class TestModelFile:
    def test_a_file_is_itself(self, tmp_path):
        assert api.model_file(str(tmp_path / "any.gguf")) == str(tmp_path / "any.gguf")

    def test_a_directory_is_its_one_model(self, tmp_path):
        for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf", "README.md"):
            (tmp_path / name).touch()
        assert api.model_file(str(tmp_path)) == str(tmp_path / "m-00001-of-00002.gguf")

    def test_an_empty_directory_and_one_of_several_models(self, tmp_path):
        with pytest.raises(ModelLoadError, match=r"holds no \.gguf file"):
            api.model_file(str(tmp_path))
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).touch()
        with pytest.raises(ModelLoadError, match=r"holds 2 models \(a\.gguf, b\.gguf\); name one"):
            api.model_file(str(tmp_path))
        for name in "cdefg":
            (tmp_path / f"{name}.gguf").touch()
        with pytest.raises(ModelLoadError, match=r"holds 7 models \(a\.gguf, b\.gguf, c\.gguf, d\.gguf …\); name one"):
            api.model_file(str(tmp_path))

    def test_only_files_are_models(self, tmp_path):
        (tmp_path / "a.gguf").mkdir()
        os.mkfifo(tmp_path / "b.gguf")
        (tmp_path / "c.gguf").touch()
        assert api.model_file(str(tmp_path)) == str(tmp_path / "c.gguf")


class TestGenerate:
    def test_one_prompt(self, llm):
        result = llm.generate("abc", max_tokens=5, temperature=0)
        assert result.completion_tokens == len(result.token_ids) == 5
        assert (result.prompt_tokens, result.finish_reason) == (3, "length")
        assert result.text == decoded(result.token_ids)
        assert result.timings.submitted <= result.timings.first_token <= result.timings.finished

    def test_defaults_are_vllm_s(self, llm):
        assert llm.generate("abc", seed=1).completion_tokens == 16
        assert llm.generate("abc", seed=1).text == llm.generate("abc", seed=1, temperature=1.0).text

    def test_a_list_gives_a_list_and_each_is_what_it_is_alone(self, llm):
        prompts = ["abc", "b", [99, 32], "abc"]
        together = llm.generate(prompts, max_tokens=8, temperature=0)
        assert [r.token_ids for r in together] == [llm.generate(p, max_tokens=8, temperature=0).token_ids for p in prompts]
        assert llm.generate([]) == []

    def test_token_ids_are_a_prompt(self, llm):
        assert llm.generate([97, 98], max_tokens=2).prompt_tokens == 2
        assert llm.generate([np.int64(97)] * 3, max_tokens=2).prompt_tokens == 3

    def test_sampling_params_or_keywords(self, llm):
        params = vllm_cpp.SamplingParams(max_tokens=3, temperature=0)
        assert llm.generate("abc", params).completion_tokens == 3
        with pytest.raises(InvalidArgumentError, match="not both"):
            llm.generate("abc", params, max_tokens=4)
        with pytest.raises(InvalidArgumentError, match="generate takes SamplingParams"):
            llm.generate("abc", {"max_tokens": 3})
        with pytest.raises(UnknownKeywordError, match="generate has no parameter 'max_token'; did you mean 'max_tokens'"):
            llm.generate("abc", max_token=3)
        with pytest.raises(InvalidArgumentError, match="top_p"):
            llm.generate("abc", top_p=2)

    @pytest.mark.parametrize("prompt", [b"a", [b"a"], [True], bytearray(b"a")])
    def test_bytes_and_truths_are_no_prompts(self, llm, prompt):
        with pytest.raises(InvalidArgumentError, match="prompt"):
            llm.generate(prompt)

    def test_one_refused_prompt_leaves_none_running(self, endless):
        with pytest.raises(InvalidArgumentError):
            endless.generate(["abc", ""], max_tokens=None)
        until(lambda: running(endless) == 0)

    def test_an_interrupted_wait_leaves_none_running(self, endless, monkeypatch):
        from vllm_cpp.request import Request

        def interrupted(self, timeout=None):
            raise KeyboardInterrupt

        monkeypatch.setattr(Request, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            endless.generate(["abc", "b"], max_tokens=None)
        until(lambda: running(endless) == 0)

    def test_threads_share_one_model(self, llm):
        expected = llm.generate("abc", max_tokens=20, temperature=0).token_ids
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(llm.generate("abc", max_tokens=20, temperature=0).token_ids)) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected] * 6


class TestStream:
    def test_the_pieces_are_the_text(self, llm):
        whole = llm.generate("abc", max_tokens=40, temperature=0)
        with llm.stream("abc", max_tokens=40, temperature=0) as stream:
            assert "".join(stream) == whole.text
            assert stream.completion.token_ids == whole.token_ids
            assert list(stream) == []

    @pytest.mark.parametrize("kind", ["text", "chunks"])
    @pytest.mark.parametrize("end", ["close", "with", "drop"])
    def test_an_iterator_given_up_ends_its_request(self, held, kind, end):
        model, goes_on = held
        chat = {"messages": [{"role": "user", "content": "abc"}], "stream": True}
        stream = model.stream("abc", max_tokens=None) if kind == "text" else model.chat(**chat)
        next(stream)
        if end == "close":
            stream.close()
            assert list(stream) == []
            goes_on.set()
            assert stream.completion.finish_reason == "abort"
        elif end == "with":
            with stream:
                pass
        else:
            del stream
        goes_on.set()
        until(lambda: sum(model.stats()["requests_finished"].values()) == 1)
        assert model.stats()["requests_finished"]["abort"] == 1

    @pytest.mark.parametrize("kind", ["text", "chunks"])
    def test_reading_on_inside_a_logits_processor_is_refused(self, llm, kind):
        chat = {"messages": [{"role": "user", "content": "abc"}], "stream": True}
        other = llm.stream("abc") if kind == "text" else llm.chat(**chat, max_tokens=16)
        next(other)

        def reads(ids, row):
            list(other)

        with pytest.raises(GenerationError, match=r"InvalidArgumentError: (stream|chat): called from a logits processor"):
            llm.generate("abc", logits_processor=reads, max_tokens=1)
        list(other)

    def test_what_is_wrong_is_said_at_the_call(self, llm):
        with pytest.raises(InvalidArgumentError, match="prompt"):
            llm.stream("")

    def test_a_failure_on_the_way_is_raised(self, llm):
        def fail(ids, row):
            if len(ids) == 3:
                raise RuntimeError("no more")

        with pytest.raises(GenerationError, match="no more"):
            list(llm.stream("abc", max_tokens=9, logits_processor=fail))
        assert llm.generate("abc", max_tokens=1).completion_tokens == 1


class TestChat:
    MESSAGES = ({"role": "user", "content": "abc"},)

    def test_an_answer_is_openai_s(self, llm):
        answer = llm.chat(self.MESSAGES, max_tokens=6, temperature=0)
        assert answer["object"] == "chat.completion"
        assert answer["usage"]["completion_tokens"] == 6
        assert answer["choices"][0]["finish_reason"] == "length"

    def test_chunks_join_to_the_answer(self, llm):
        whole = llm.chat(self.MESSAGES, max_tokens=20, temperature=0)["choices"][0]["message"]["content"]
        chunks = list(llm.chat(self.MESSAGES, stream=True, max_tokens=20, temperature=0))
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"

    def test_a_failure_ends_the_chunks(self, llm, monkeypatch):
        monkeypatch.setattr(llm._engine._runner, "run", lambda chunks: 1 / 0)
        with pytest.raises(GenerationError, match="division"):
            list(llm.chat(self.MESSAGES, stream=True))

    def test_an_unknown_field_is_refused(self, llm):
        with pytest.raises(UnknownKeywordError, match="max_token"):
            llm.chat(self.MESSAGES, max_token=3)
        with pytest.raises(InvalidArgumentError, match="messages"):
            llm.chat(3)
        with pytest.raises(InvalidArgumentError, match="stream must be True or False, not 'no'"):
            llm.chat(self.MESSAGES, stream="no")


class TestFork:
    CHILD = """
import os, signal, sys, threading
from fakes import models
models.install()
import vllm_cpp
model = vllm_cpp.load("fake.gguf")
model.generate("abc", max_tokens=2)
stream = model.stream("abc", max_tokens=None, logits_processor=lambda ids, row: len(ids) < 8 or going_on.wait())
going_on = threading.Event()
next(stream)
model._engine._wake.acquire()  # as the step thread may have at any fork
child = os.fork()
if child == 0:
    signal.alarm(30)
    def refused(what, use):
        try:
            use()
        except vllm_cpp.GenerationError as error:
            print(what, error)
    refused("generate:", lambda: model.generate("abc"))
    refused("stream:", lambda: list(stream))
    stream.close()
    model.close()
    with vllm_cpp.load("fake.gguf") as own:
        print("own:", own.generate("abc", max_tokens=3).completion_tokens)
    sys.exit()  # through the handlers of the exit
model._engine._wake.release()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
stream.close()
going_on.set()
print("parent:", code, model.generate("abc", max_tokens=3).completion_tokens)
"""

    def test_a_child_is_refused_and_may_load_its_own(self):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "engine"), str(ROOT / "tests")))}
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", self.CHILD]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr == ""
        assert done.stdout.splitlines() == [
            "generate: the engine was started before fork(), and a forked child cannot use it; load after the fork, or exec",
            "stream: stream: request 2 runs in the process this one was forked from; wait for it there",
            "own: 3",
            "parent: 0 3",
        ]


class TestTheRest:
    def test_tokens_both_ways(self, llm):
        assert llm.tokenize("aé") == [97, 0xC3, 0xA9]
        assert llm.detokenize([97, 0xC3, 0xA9]) == "aé"
        with pytest.raises(InvalidArgumentError, match=r"token_ids\[1\]"):
            llm.detokenize([97, 99999])
        with pytest.raises(InvalidArgumentError, match="tokenize takes a string"):
            llm.tokenize(b"a")
        for flag in ("add_special", "parse_special"):
            with pytest.raises(InvalidArgumentError, match=f"{flag} must be True or False, not 'no'"):
                llm.tokenize("a", **{flag: "no"})
        with pytest.raises(InvalidArgumentError, match="skip_special must be True or False, not 'no'"):
            llm.detokenize([97], skip_special="no")
        for wrong in (5, b"a", "a", None, [True], [1.0]):
            with pytest.raises(InvalidArgumentError, match="token_ids"):
                llm.detokenize(wrong)

    def test_stats_and_repr(self, llm):
        llm.generate("abc", max_tokens=2)
        assert llm.stats()["generated_tokens"] == 2
        assert repr(llm) == ("<vllm_cpp.LLM fake.gguf fake (Q4_K 3.0 MiB, F32 0.5 MiB) on cpu, weights in memory, max_model_len=512>")

    def test_embed_says_what_to_use(self, llm):
        with pytest.raises(InvalidArgumentError, match=r"generates text and does not embed .*: call generate or chat"):
            llm.embed("abc")

    def test_use_after_close(self, monkeypatch):
        monkeypatch.setattr(api, "build_engine", models.build)
        model = api.load("fake.gguf")
        model.close()
        model.close()
        assert repr(model) == "<vllm_cpp.LLM fake.gguf closed>"
        for use in (
            lambda: model.generate("a"),
            lambda: model.stream("a"),
            lambda: model.chat([]),
            model.stats,
            lambda: model.tokenize("a"),
        ):
            with pytest.raises(GenerationError, match="this model was closed; load it again"):
                use()

    def test_a_model_that_is_dropped_is_closed(self, monkeypatch):
        built = []
        monkeypatch.setattr(api, "build_engine", lambda params, progress: built.append(models.build(params)) or built[0])
        model = api.load("fake.gguf", max_model_len=64)
        assert built[0].params.max_model_len == 64
        del model
        gc.collect()
        assert built[0]._runner.closed_by is not None

    def test_progress_is_reported(self, monkeypatch):
        monkeypatch.setattr(api, "build_engine", models.build)
        said = []
        api.load("fake.gguf", progress=lambda what, fraction: said.append((what, fraction))).close()
        assert said == [("preparing the kernels", 0.5)]
