"""One request, as the caller holds it, and the delivery of its text.

Owns: cancelling, waiting, what became of the request, and the thread that calls the caller's callback. Must not know the scheduler, the
sampler or the model: the engine's step thread fills a request in and ends it.

Delivery. A request without a callback is ended by the step thread and costs no thread. A request with one gets a thread of its own, started
when its first text is ready and gone after its last call: deliveries keep their order without a lock, and a callback that is slow, or never
returns, holds up its own request only. `wait` returns, and `done` turns true, after the last call has returned, so whatever the callback
uses may then be freed. Every piece of text is one call, as the engine makes it; the call with `finished` set is the last.
"""

from __future__ import annotations

import queue
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vllm_cpp.errors import GenerationError, InvalidArgumentError, VllmError

OnDelta = Callable[[str, bool], bool | None]


class WaitTimeoutError(GenerationError):
    """`wait` was given a time, and the request is still running after it."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of the monotonic clock. `first_token` is None when none was generated."""

    submitted: float
    first_token: float | None
    finished: float


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request ended with.

    `token_ids` are all generated ids, an end token included; the text of an end token, like that of a stop string, is not in `text`.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    finish_reason: str  # stop, length, abort or error
    timings: Timings


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """What a request to embed a text ended with: float32 [dim], of length 1 (None if it failed)."""

    values: np.ndarray | None
    prompt_tokens: int
    timings: Timings


class Host(Protocol):
    """What a request needs of its engine."""

    def cancel(self, request: Request, /) -> None: ...

    @property
    def delivery_threads(self) -> weakref.WeakSet[threading.Thread]: ...

    @property
    def is_forked(self) -> bool: ...

    def is_step_thread(self, thread: threading.Thread, /) -> bool: ...


class LibraryThread(threading.Thread):
    """A thread of the library: it takes none of the host's signals, and does not keep the process alive."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)

    def start(self) -> None:
        # A new thread has its parent's mask from its first instruction, so it is the parent that must block them meanwhile.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Request:
    """A request that was handed to the engine. Its methods may be called from any thread."""

    def __init__(self, number: int, host: Host, on_delta: OnDelta | None) -> None:
        self.number = number
        self.on_delta = on_delta
        self.job: Any = None  # the engine's own; None again once the request has ended
        self._host = host
        self._done = threading.Event()
        self._completion: Completion | None = None
        self._failure: VllmError | None = None
        self._deliveries: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._delivery_thread: threading.Thread | None = None

    # for the caller

    def cancel(self) -> None:
        """End the request as soon as the running step is over; finish_reason is "abort". A request that has ended stays as it is."""
        if self._completion is None:
            self._host.cancel(self)

    def wait(self, timeout: float | None = None) -> Completion:
        """Wait until the request has ended and its last delivery has returned; raises what went wrong, if anything did."""
        self.refuse_endless_wait("wait")
        if not self._done.wait(timeout):
            raise WaitTimeoutError(f"wait: request {self.number} is still running after {timeout:g} s")
        if self._failure is not None:
            # A new object for each waiter: an exception that several threads raise collects all their tracebacks.
            raise type(self._failure)(str(self._failure)) from self._failure.__cause__
        return self.completion

    def refuse_endless_wait(self, caller: str) -> None:
        """Raise where waiting for this request could never end. Every way to wait for a request asks this first."""
        current = threading.current_thread()
        if current is self._delivery_thread:
            raise InvalidArgumentError(
                f"{caller}: called from request {self.number}'s own callback, for which it would wait; return from it"
            )
        if self._host.is_step_thread(current):
            raise InvalidArgumentError(
                f"{caller}: called from a logits processor, which every request waits for; call it from another thread"
            )
        if self._host.is_forked and not self.done:
            raise GenerationError(f"{caller}: request {self.number} runs in the process this one was forked from; wait for it there")

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done.is_set()

    @property
    def error(self) -> str:
        """What went wrong; "" while nothing has."""
        return "" if self._failure is None else str(self._failure)

    @property
    def completion(self) -> Completion:
        """What the request ended with, a failure included; known to the callback from its last call on."""
        if self._completion is None:
            raise InvalidArgumentError(f"request {self.number} is still running; wait for it first")
        return self._completion

    # for the step thread

    def deliver(self, text: str) -> None:
        if self.on_delta is not None:
            self._put(text, False)

    def end(self, completion: Completion, rest: str, failure: VllmError | None) -> None:
        """The request is over; `rest` is the text that was not delivered yet."""
        if failure is not None:  # else keep what the callback may have raised
            self._failure = failure
        self._completion = completion
        if self.on_delta is None:
            self._done.set()
            return
        try:
            self._put(rest, True)
        except RuntimeError as error:  # the process may start no more threads
            self._failure = GenerationError(f"no thread could be started for the callback of request {self.number}: {error}")
            self._done.set()

    def _put(self, text: str, finished: bool) -> None:
        self._deliveries.put((text, finished))
        if self._delivery_thread is None:
            # Known to the engine and to `wait` before it runs: the callback may ask both.
            thread = self._delivery_thread = LibraryThread(self._call_back, f"vllm-delivery-{self.number}")
            self._host.delivery_threads.add(thread)
            try:
                thread.start()
            except RuntimeError:
                self._delivery_thread = None
                self._host.delivery_threads.discard(thread)
                raise

    def _call_back(self) -> None:
        assert self.on_delta is not None
        wanted, finished = True, False
        while not finished:
            text, finished = self._deliveries.get()
            if not wanted:
                continue
            try:
                answer = self.on_delta(text, finished)
            except BaseException as error:  # noqa: BLE001 - SystemExit too: it would end this thread and leave the waiters waiting
                wanted = False
                self._failure = GenerationError(f"the callback of request {self.number} raised {type(error).__name__}: {error}")
                self._failure.__cause__ = error
            else:
                wanted = answer is None or bool(answer)
            if not wanted and not finished:
                self.cancel()
        self._done.set()
