"""The bridge's parts, without C: handles, porters, and what an exception becomes."""

from __future__ import annotations

import gc
import re
import signal
import threading
import time
import weakref
from unittest import mock

import pytest

from clibrary import C_SOURCES, build_module
from vllm_capi import bridge
from vllm_capi.handles import HandleTable
from vllm_capi.porters import Porters
from vllm_capi.streams import RequestHandle, Stream
from vllm_cpp.errors import GenerationError, InternalError, InvalidArgumentError, ModelLoadError, UnknownKeywordError


def test_handles_are_never_reused() -> None:
    table = HandleTable()
    first, second = table.add("engine", "a"), table.add("request", "b")
    assert table.get(first, "engine") == "a"
    assert table.get(second, "stream", "request") == "b"
    assert first % 16 == second % 16 == 0
    assert min(first, second) > 0xFFFF
    assert table.pop(first, "request") is None
    assert table.pop(first, "engine") == "a"
    assert table.pop(first, "engine") is None
    assert table.add("engine", "c") not in (first, second)
    for handle, kind in ((first, "engine"), (second, "engine"), (0, "engine"), (2**64 - 1, "request")):
        with pytest.raises(InvalidArgumentError, match=f"{handle:#x} is not a live {kind} handle"):
            table.get(handle, kind)
    assert len(table) == 2


def test_porters_work_at_once_and_block_signals() -> None:
    porters = Porters()
    barrier = threading.Barrier(5)
    results: list[set[signal.Signals]] = []

    def job() -> set[signal.Signals]:
        barrier.wait(10)  # all five run together, or nobody passes
        return signal.pthread_sigmask(signal.SIG_BLOCK, [])

    callers = [threading.Thread(target=lambda: results.append(porters.run(job))) for _ in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 5
    assert all({signal.SIGINT, signal.SIGTERM, signal.SIGUSR1} <= mask for mask in results)


def test_porters_raise_to_their_caller_and_keep_nothing() -> None:
    class Thing:
        pass

    porters, thing = Porters(), Thing()
    with pytest.raises(KeyError, match="lost"):
        porters.run(lambda: {}["lost"])
    assert porters.run(type, thing) is Thing
    alive = weakref.ref(thing)
    del thing
    porters.run(gc.collect)
    assert alive() is None


def test_what_an_interrupted_caller_asked_for_is_given_up() -> None:
    release, given_up = threading.Event(), threading.Event()
    unwanted: list[str] = []

    def job() -> str:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        release.wait(10)
        return "an engine"

    with pytest.raises(KeyboardInterrupt):
        Porters().run(job, unwanted=lambda result: (unwanted.append(result), given_up.set()))
    release.set()
    assert given_up.wait(10)
    assert unwanted == ["an engine"]


def no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_start_is_no_mistake_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    with pytest.raises(GenerationError, match="no thread could be started for this call: can't start new thread"):
        Porters().run(int)


def test_a_chat_that_nobody_can_wait_for_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    request = mock.Mock()
    monkeypatch.setattr("vllm_cpp.openai.chat.submit", lambda *_: request)
    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    with pytest.raises(GenerationError, match="no thread"):
        Stream().open_chat(mock.Mock(), "{}", Porters().start)
    request.cancel.assert_called_once_with()


def test_all_who_ask_for_a_failure_get_one_text() -> None:
    """C keeps its address until the request is freed."""

    def new(_kind: str, _text: bytes) -> object:
        time.sleep(0.05)  # long enough for all to come by
        return object()

    door = bridge.Bridge(mock.Mock(new=new), mock.Mock())
    request = RequestHandle()
    request.failure = GenerationError("no luck")
    request.delivered()
    handle = door.handles.add("request", request)
    answers: list[list[object]] = [[None] for _ in range(4)]
    askers = [threading.Thread(target=door.request_error, args=(handle, answer)) for answer in answers]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len({id(answer[0]) for answer in answers}) == 1


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (InvalidArgumentError("this is wrong"), 1, "this is wrong"),
        (UnknownKeywordError("no such"), 1, "no such"),
        (ModelLoadError("no file"), 2, "no file"),
        (GenerationError("no luck"), 3, "no luck"),
        (MemoryError(), 3, "out of memory"),
        (ModuleNotFoundError("No module named 'numba'"), 3, "No module named 'numba'"),
        (InternalError("a mistake"), 4, "a mistake"),
        (ZeroDivisionError("by zero"), 4, "ZeroDivisionError: by zero; please report it"),
        (SystemExit(3), 4, "SystemExit"),
        (KeyboardInterrupt(), 3, "interrupted (KeyboardInterrupt); what this call began was cancelled"),
    ],
)
def test_what_an_exception_becomes(error: BaseException, status: int, text: str) -> None:
    got, said = bridge.status_and_text(error)
    assert got == status
    assert text in said


def test_an_import_that_fails_while_loading_is_a_broken_installation() -> None:
    wrapped = InternalError("loading failed")
    wrapped.__cause__ = ImportError("half a wheel")
    assert bridge.status_and_text(wrapped) == (3, "the Python side is broken: ImportError: half a wheel; install vllm-cpp again")


def test_every_call_of_the_door_is_implemented() -> None:
    declared = re.findall(r"^vllm_status vllmpy_(\w+)\(", (C_SOURCES / "calls.h").read_text(), re.MULTILINE)
    assert sorted(declared) == sorted(bridge.CALLS)
    assert all(callable(getattr(bridge.Bridge, name)) for name in declared)
    table = re.search(r"#define DOOR_CALLS\(X\)(.*?)\n\n", (C_SOURCES / "door.h").read_text(), re.DOTALL)
    assert table is not None
    assert sorted(re.findall(r"X\((\w+)\)", table[1])) == sorted(declared)


def test_described_paths() -> None:
    files = build_module().describe("@lib@", "@lib@/../include", "1.2.3", here="@lib@")
    assert set(files) == {"pkgconfig/vllm.pc", "cmake/vllm/vllmConfig.cmake", "cmake/vllm/vllmConfigVersion.cmake"}
    assert "libdir=${pcfiledir}/..\n" in files["pkgconfig/vllm.pc"]
    assert "includedir=${pcfiledir}/../../include\n" in files["pkgconfig/vllm.pc"]
    assert '"${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE' in files["cmake/vllm/vllmConfig.cmake"]
    assert not [name for name, text in files.items() if "@" in text]
