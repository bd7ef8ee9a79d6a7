"""Two engines in one process, in both orders and from several threads: what a second document changes, keeps, or may no longer change."""

from __future__ import annotations

import itertools
import threading

import pytest

import tiny_models
from vllm_cpp import api, env, log
from vllm_cpp.config.offload import freeze_expert_stream, freeze_geometry, resolve
from vllm_cpp.config.offload.install import reset
from vllm_cpp.errors import ModelLoadError


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
    path = tmp_path_factory.mktemp("two") / "tiny.gguf"
    tiny_models.build("llama", dtype="F32").write(path)
    return path


def vllm_cpp(**groups):
    return {"vllm_cpp": groups}


MAPPED, COPIED = vllm_cpp(mmap={"enabled": True}), vllm_cpp(mmap={"enabled": False})
NOT_STREAMED = vllm_cpp(expert_stream={"enabled": False})
SLOTS = vllm_cpp(expert_stream={"slots": 9})
NOTHING = None


def where(model) -> str:
    return "memory" if "weights in memory" in repr(model) else "mapping"


def tokens(model) -> list[int]:
    return model.generate("hello", max_tokens=6, temperature=0, ignore_eos=True).token_ids


@pytest.mark.parametrize(
    ("first", "second", "places"),
    [
        (MAPPED, COPIED, ("mapping", "memory")),
        (COPIED, MAPPED, ("memory", "mapping")),
        (COPIED, NOTHING, ("memory", "memory")),
        (NOTHING, COPIED, ("mapping", "memory")),
        (COPIED, SLOTS, ("memory", "memory")),
        (SLOTS, COPIED, ("mapping", "memory")),
        (COPIED, COPIED, ("memory", "memory")),
        (NOTHING, NOTHING, ("mapping", "mapping")),
    ],
)
def test_both_live_and_each_keeps_what_it_was_loaded_with(tiny, first, second, places):
    with api.load(tiny, threads=1, offload_config=first) as one, api.load(tiny, threads=1, offload_config=second) as two:
        assert (where(one), where(two)) == places
        assert tokens(one) == tokens(two) == tokens(one)


def test_a_variable_wins_over_both_and_says_so_once(tiny, monkeypatch, capfd):
    monkeypatch.setenv("VT_GGUF_MMAP", "1")
    with api.load(tiny, threads=1, offload_config=COPIED) as one, api.load(tiny, threads=1, offload_config=COPIED) as two:
        assert (where(one), where(two)) == ("mapping", "mapping")
    said = capfd.readouterr().err
    assert said.count("OVERRIDES the config for VT_GGUF_MMAP (mmap)") == said.count("offload_config vllm_cpp): mmap=off") == 1
    monkeypatch.delenv("VT_GGUF_MMAP")
    with api.load(tiny, threads=1) as three:
        assert where(three) == "memory"  # what was said before stands


ASKS = {"on": vllm_cpp(expert_stream={"enabled": True}), "off": NOT_STREAMED, "nothing": NOTHING, "partial": COPIED}


@pytest.mark.parametrize(("decided", "asked"), list(itertools.product([True, False], ASKS)))
@pytest.mark.parametrize("variable", [None, "0", "1"])
def test_whether_experts_are_streamed_is_decided_once(tiny, monkeypatch, decided, asked, variable):
    """Refused is a document that asks and would change the decision, the environment included; everything else goes along."""
    freeze_expert_stream(decided)
    if variable is not None:
        monkeypatch.setenv("VT_MOE_EXPERT_STREAM", variable)
    wanted = {"on": True, "off": False}.get(asked)
    if wanted is not None and variable is not None:
        wanted = variable == "1"
    if wanted in (None, decided):
        with api.load(tiny, threads=1, offload_config=ASKS[asked]):
            assert resolve().expert_stream is decided
    else:
        in_force = "on" if decided else "off"
        with pytest.raises(ModelLoadError, match=rf"expert_stream cannot be changed .* \(in force: expert_stream={in_force}\)"):
            api.load(tiny, threads=1, offload_config=ASKS[asked])
        assert resolve().expert_stream is decided


@pytest.mark.parametrize(
    ("stream", "refused"),
    [
        ({"slots": 8}, None),
        ({"slot_bytes": 4096}, None),
        ({"slots": 8, "slot_bytes": 4096}, None),
        ({"slots": 9}, "expert_stream_slots cannot be changed .* expert_stream_slots=8"),
        ({"slots": 8, "slot_bytes": 1}, "expert_stream_slot_bytes cannot be changed .* expert_stream_slot_bytes=4096"),
    ],
)
def test_the_arena_is_built_once(tiny, stream, refused):
    freeze_geometry(8, 4096)
    if refused is None:
        api.load(tiny, threads=1, offload_config=vllm_cpp(expert_stream=stream)).close()
    else:
        with pytest.raises(ModelLoadError, match=refused):
            api.load(tiny, threads=1, offload_config=vllm_cpp(expert_stream=stream))
        api.load(tiny, threads=1).close()


def test_a_refused_second_document_leaves_no_trace(tiny):
    freeze_expert_stream(False)
    with api.load(tiny, threads=1, offload_config=MAPPED) as one:
        with pytest.raises(ModelLoadError):
            api.load(tiny, threads=1, offload_config={"vllm_cpp": {**COPIED["vllm_cpp"], **ASKS["on"]["vllm_cpp"]}})
        with api.load(tiny, threads=1) as two:
            assert (where(one), where(two)) == ("mapping", "mapping")


def test_threads_that_load_at_once_each_get_what_they_asked_for(tiny):
    api.load(tiny, threads=1).close()  # decides that nothing is streamed
    documents = [MAPPED, COPIED, NOT_STREAMED, ASKS["on"], SLOTS, {"vllm-cpp": {}}] * 2
    found: list[object] = [None] * len(documents)
    together = threading.Barrier(len(documents))

    def load(index: int) -> None:
        together.wait()
        try:
            with api.load(tiny, threads=1, offload_config=documents[index]) as model:
                found[index] = (where(model), tokens(model))
        except Exception as error:  # noqa: BLE001 - compared below
            found[index] = type(error).__name__

    threads = [threading.Thread(target=load, args=(index,)) for index in range(len(documents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = {tuple(one[1]) for one in found if isinstance(one, tuple)}
    assert len(texts) == 1
    for document, one in zip(documents, found, strict=True):
        if document is ASKS["on"]:
            assert one == "ModelLoadError"
        elif "vllm-cpp" in document:
            assert one == "InvalidArgumentError"
        else:
            assert isinstance(one, tuple)
            assert one[0] == {id(MAPPED): "mapping", id(COPIED): "memory"}.get(id(document), one[0])
