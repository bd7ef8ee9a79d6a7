"""The bridge: the functions that the C door calls, over the engine that Python callers use.

Owns the body of each call in c/calls.h, and the rule that nothing leaves it but a status: an exception becomes a status and this thread's
error text. Must not compute anything, and must not import what is heavy before the first engine is loaded: cheap questions stay cheap.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_capi.handles import HandleTable
from vllm_capi.params import StructReader
from vllm_capi.porters import Porters
from vllm_capi.streams import RequestHandle, Stream
from vllm_cpp.errors import GenerationError, InternalError, InvalidArgumentError, VllmError
from vllm_cpp.residency import statistics

if TYPE_CHECKING:
    from vllm_cpp.config.engine import EngineParams
    from vllm_cpp.core import Engine
    from vllm_cpp.request import Completion, Request

# Python's own default is the host's ulimit, which may be anything; a compiler runs on these threads.
_STACK_BYTES = 16 << 20
_COMPILE_PATIENCE_S = 30.0  # a kernel takes about one


def status_and_text(error: BaseException) -> tuple[int, str]:
    """What a C caller is told of an exception."""
    cause = error.__cause__ if isinstance(error, InternalError) else error
    if isinstance(cause, ImportError):  # a broken installation, wherever it came to light
        return GenerationError.status, f"the Python side is broken: {type(cause).__name__}: {cause}; install vllm-cpp again"
    if isinstance(error, VllmError):
        return error.status, str(error)
    if isinstance(error, KeyboardInterrupt):
        return GenerationError.status, "interrupted (KeyboardInterrupt); what this call began was cancelled"
    if isinstance(error, MemoryError):
        return GenerationError.status, "out of memory"
    return InternalError.status, f"{type(error).__name__}: {error}; please report it"


def _while_loading() -> None:
    """Called again and again while a model loads; `bind` puts the bridge's own in its place."""


def build_engine(params: EngineParams) -> Engine:
    from vllm_cpp import api

    return api.build_engine(params, lambda *_: _while_loading())


def _hold_the_compiler() -> None:
    """Wait for the call into LLVM that is under way, and let no other begin: all of them take this lock."""
    sys.modules["llvmlite.binding.ffi"].lib._lock._lock.acquire(timeout=_COMPILE_PATIENCE_S)


class Bridge:
    """One process's engines, streams and requests. `build` makes an engine of parameters."""

    def __init__(self, ffi: Any, lib: Any, build: Callable[[EngineParams], Engine] = build_engine) -> None:
        self.ffi = ffi
        self.lib = lib
        self.build = build
        self.handles = HandleTable()
        self.porters = Porters()
        self.read = StructReader(ffi)
        self._error_lock = threading.Lock()
        self._last_call: Any = None

    def told(self, error: BaseException) -> int:
        """The status of an exception; its text becomes this thread's error.

        A host that is a Python itself may be interrupted while it waits in here. It learns that from its own handler, as of any other call:
        C raises the signal again when no frame of ours is left.
        """
        status, text = status_and_text(error)
        self.lib.vllmpy_set_error(text.encode("utf-8", "replace"))
        if isinstance(error, KeyboardInterrupt):
            self.lib.vllmpy_interrupted()
        return status

    # what C gets

    def copy(self, text: str) -> Any:
        """The text in memory that C frees. A U+0000 would end it early."""
        data = text.replace("\0", "\ufffd").encode("utf-8", "replace")
        pointer = self.lib.vllmpy_copy(data, len(data))
        if not pointer:
            raise MemoryError
        return pointer

    def fill(self, out: Any, completion: Completion) -> None:
        out.text = self.copy(completion.text)
        out.finish_reason = self.lib.vllmpy_finish_reason(completion.finish_reason.encode())
        out.prompt_tokens = completion.prompt_tokens
        out.completion_tokens = completion.completion_tokens

    def engine(self, handle: int) -> Engine:
        engine: Engine = self.handles.get(handle, "engine")
        return engine

    # engines

    def stop_compiling_at_exit(self) -> None:
        """Have the process's end wait for the call into LLVM that is under way, and let no other begin.

        exit() takes LLVM down while our threads run, and LLVM aborts when that happens in the middle of its work. What is loaded before the
        request is taken down after it, so it is made as soon as LLVM is there.
        """
        with self._error_lock:
            if self._last_call is None and "llvmlite.binding" in sys.modules and self.lib.vllmpy_owns_interpreter():
                self._last_call = self.ffi.callback("void(void)", _hold_the_compiler)
                self.lib.vllmpy_before_exit(self._last_call)

    def engine_load(self, c_params: Any, out: Any) -> None:
        engine = self.porters.run(self.build, self.read.engine_params(c_params), unwanted=lambda engine: engine.close())
        out[0] = self.handles.add("engine", engine)

    def engine_free(self, handle: int) -> None:
        engine = self.handles.pop(handle, "engine")
        if engine is None:
            return
        if engine.is_step_thread(threading.current_thread()):
            engine.close()  # from a logits processor: only asks, and a porter would wait for the thread we hold up
            return
        self.porters.run(engine.close)
        del engine
        self.porters.run(gc.collect)  # an engine's parts refer to each other, and a freed model's memory is wanted back now

    # blocking answers

    def submit(self, handle: int, prompt: str | list[int], c_params: Any) -> Request:
        params = self.read.sampling_params(c_params)
        request: Request = self.porters.run(self.engine(handle).submit, prompt, params, unwanted=lambda request: request.cancel())
        return request

    def wait(self, request: Request) -> Completion:
        try:
            return request.wait()
        except BaseException:  # refused here, or interrupted: nobody will ask for the answer
            request.cancel()
            raise

    def complete(self, handle: int, prompt: Any, c_params: Any, out: Any) -> None:
        self.fill(out, self.wait(self.submit(handle, self.read.text("prompt", prompt), c_params)))

    def complete_tokens(
        self, handle: int, prompt: Any, n_prompt: int, c_params: Any, out_tokens: Any, max_out: int, n_out: Any, out: Any
    ) -> None:
        completion = self.wait(self.submit(handle, self.ffi.unpack(prompt, n_prompt), c_params))
        if out:
            self.fill(out, completion)
        reported = completion.token_ids[:max_out]
        if reported:
            out_tokens[0 : len(reported)] = reported
        n_out[0] = len(reported)

    def chat(self, handle: int, document: Any, out: Any) -> None:
        engine, text = self.engine(handle), self.read.text("request_json", document)
        request, respond = self.porters.run(_begin_chat, engine, text, unwanted=lambda begun: begun[0].cancel())
        out[0] = self.copy(self.porters.run(respond, self.wait(request)))

    def embed(self, handle: int, texts: Any, n_texts: int, out: Any) -> None:
        engine, given = self.engine(handle), self.read.texts("texts", texts, n_texts)
        requests = self.porters.run(_begin_embeddings, engine, given, unwanted=_cancel)
        try:
            embeddings = [request.wait() for request in requests]
        except BaseException:  # one of them failed, or the caller was interrupted: nobody will ask for the others
            _cancel(requests)
            raise
        rows = b"".join([embedding.values.tobytes() for embedding in embeddings])
        values = self.lib.vllmpy_copy(rows, len(rows))
        if not values:
            raise MemoryError
        out.values = self.ffi.cast("float *", values)
        out.n_embeddings = len(embeddings)
        out.dim = len(embeddings[0].values)
        out.prompt_tokens = sum(embedding.prompt_tokens for embedding in embeddings)

    def transcribe(self, handle: int) -> None:
        kind, calls = ("an embedding", "vllm_embed") if self.engine(handle).embeds else ("a text-generation", "vllm_complete or vllm_chat")
        raise InvalidArgumentError(
            f"this is {kind} engine, which does not transcribe: call {calls}; there are no transcription models in this version"
        )

    # streams

    def stream_open(self, handle: int, prompt: Any, c_params: Any, out: Any) -> None:
        out[0] = self.handles.add("stream", self.open_text(Stream(), handle, prompt, c_params))

    def open_text(self, stream: Stream, handle: int, prompt: Any, c_params: Any) -> Stream:
        engine = self.engine(handle)
        text, params = self.read.text("prompt", prompt), self.read.sampling_params(c_params)
        self.porters.run(stream.open_text, engine, text, params, unwanted=lambda _: stream.cancel())
        return stream

    def chat_stream_open(self, handle: int, document: Any, out: Any) -> None:
        stream, engine, text = Stream(), self.engine(handle), self.read.text("request_json", document)
        self.porters.run(stream.open_chat, engine, text, self.porters.start, unwanted=lambda _: stream.cancel())
        out[0] = self.handles.add("stream", stream)

    def stream_next(self, handle: int, delta: Any, finished: Any) -> None:
        text, finished[0] = self.handles.get(handle, "stream", "request").next()
        delta[0] = self.copy(text)

    def stream_close(self, handle: int) -> None:
        stream = self.handles.pop(handle, "stream")
        if stream is not None:
            stream.cancel()

    # requests

    def request(self, handle: int) -> RequestHandle:
        request: RequestHandle = self.handles.get(handle, "request")
        if request.abandoned:
            raise InvalidArgumentError(f"{handle:#x} is not a live request handle: it was freed already")
        return request

    def request_open(self, handle: int, prompt: Any, c_params: Any, out: Any) -> None:
        out[0] = self.handles.add("request", self.open_text(RequestHandle(), handle, prompt, c_params))

    def request_delivered(self, handle: int) -> None:
        request = self.handles.get(handle, "request")
        request.delivered()
        if request.abandoned:
            self.handles.pop(handle, "request")

    def request_cancel(self, handle: int) -> None:
        self.request(handle).cancel()

    def request_wait(self, handle: int) -> None:
        self.request(handle).wait()

    def request_done(self, handle: int, out: Any) -> None:
        request = self.handles.find(handle, "request")
        out[0] = request is not None and request.done and not request.abandoned

    def request_error(self, handle: int, out: Any) -> None:
        request = self.handles.find(handle, "request")
        if request is not None and request.done and request.failure is not None:
            with self._error_lock:  # one text for all who ask: C keeps its address
                if request.error_text is None:
                    text = status_and_text(request.failure)[1]
                    request.error_text = self.ffi.new("char[]", text.replace("\0", "\ufffd").encode("utf-8", "replace"))
            out[0] = request.error_text

    def request_free(self, handle: int, wait: bool) -> None:
        request = self.handles.find(handle, "request")
        if request is None or request.abandoned:
            return
        request.cancel()
        if wait:
            try:
                request.wait_delivered()
            except VllmError:  # nobody may wait here; the delivery ends the handle
                request.abandoned = True
                if not request.done:
                    return
            except KeyboardInterrupt:  # the call that may be under way still uses what the host frees next
                request.wait_delivered()
                self.handles.pop(handle, "request")
                raise
        self.handles.pop(handle, "request")


def _begin_embeddings(engine: Engine, texts: tuple[str, ...]) -> list[Request]:
    requests: list[Request] = []
    try:
        for index, text in enumerate(texts):
            requests.append(engine.submit_embedding(text, f"texts[{index}]"))
    except BaseException:
        _cancel(requests)
        raise
    return requests


def _cancel(requests: list[Request]) -> None:
    for request in requests:
        request.cancel()


def _begin_chat(engine: Engine, document: str) -> tuple[Request, Callable[[Completion], str]]:
    import json

    from vllm_cpp.openai import chat

    request, respond = chat.begin(engine, document)
    return request, lambda completion: json.dumps(respond(completion), ensure_ascii=False, separators=(",", ":"))


def _entry(bridge: Bridge, function: Callable[..., None]) -> Callable[..., int]:
    @functools.wraps(function)
    def call(*arguments: Any) -> int:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt too: nothing crosses into C
            return bridge.told(error)
        return 0

    return call


def bind(ffi: Any, lib: Any, build: Callable[[EngineParams], Engine] = build_engine) -> None:
    """Gives C its functions. Runs once, on Python's main thread when libvllm started it."""
    if lib.vllmpy_owns_interpreter():
        threading.stack_size(_STACK_BYTES)
    bridge = Bridge(ffi, lib, build)
    global _while_loading
    _while_loading = bridge.stop_compiling_at_exit
    statistics.watch(lambda address: lib.vllmpy_watch_counters(ffi.cast("int64_t *", address)))
    prefix = "vllmpy_"
    for name in CALLS:
        # The second net: what cffi itself cannot convert, which `call` never sees, is a status as well, and prints nothing.
        ffi.def_extern(name=prefix + name, error=InternalError.status, onerror=lambda _, error, __: bridge.told(error))(
            _entry(bridge, getattr(bridge, name))
        )


CALLS = (
    "engine_load",
    "engine_free",
    "complete",
    "complete_tokens",
    "chat",
    "embed",
    "transcribe",
    "stream_open",
    "chat_stream_open",
    "stream_next",
    "stream_close",
    "request_open",
    "request_delivered",
    "request_cancel",
    "request_wait",
    "request_done",
    "request_error",
    "request_free",
)
