"""Answers on their way to C.

Owns what lies between an engine's request and the C loop that calls the caller's callback: a queue of texts, and for
`vllm_request_submit` the state that other threads ask about. Must not call callbacks (surface.c does) nor know C structs.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_cpp.errors import GenerationError, VllmError

if TYPE_CHECKING:
    from vllm_cpp.core import Engine
    from vllm_cpp.request import Request


class Stream:
    """The deltas of one answer, in order, and how it ended."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, bool] | BaseException] = queue.SimpleQueue()
        self._request: Request | None = None
        self.failure: BaseException | None = None

    def open_text(self, engine: Engine, prompt: str, params: Any) -> None:
        """The answer as text. The engine's thread only enqueues here, so a slow reader holds up nobody."""

        def on_delta(text: str, finished: bool) -> bool:
            self._queue.put((text, finished))
            return True

        self._request = engine.submit(prompt, params, on_delta)

    def open_chat(self, engine: Engine, document: str, start: Callable[[Callable[[], None]], None]) -> None:
        """The answer as JSON chunks, then ""; `start` runs the wait for its end elsewhere."""
        from vllm_cpp.openai import chat

        def on_chunk(chunk: dict[str, Any]) -> bool:
            self._queue.put((json.dumps(chunk, ensure_ascii=False, separators=(",", ":")), False))
            return True

        request = self._request = chat.submit(engine, document, on_chunk)

        def wait() -> None:
            try:
                request.wait()
                self._queue.put(("", True))
            except BaseException as error:  # noqa: BLE001 - it is the reader's
                self._queue.put(error)

        try:
            start(wait)
        except BaseException:
            request.cancel()
            raise

    def next(self) -> tuple[str, bool]:
        """The next delta and whether it is the last; raises the failure of an answer that failed."""
        try:
            self.refuse_endless_wait()
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            if item[1] and self._request is not None and self._request.error:
                self._request.wait()
        except BaseException as error:
            self.failure = error
            raise
        return item

    def refuse_endless_wait(self) -> None:
        """Raises on a thread that the answer itself waits for, such as that of a logits processor."""
        if self._request is not None:
            self._request.refuse_endless_wait("wait")

    def cancel(self) -> None:
        if self._request is not None:
            self._request.cancel()


class RequestHandle(Stream):
    """A stream that a thread of the library delivers while others watch it."""

    def __init__(self) -> None:
        super().__init__()
        self._delivered = threading.Event()
        self.error_text: Any = None  # the C string of a failure, once somebody asked
        self.abandoned = False  # freed where nobody may wait; gone from the table once delivered

    @property
    def done(self) -> bool:
        return self._delivered.is_set()

    def next(self) -> tuple[str, bool]:
        item = super().next()
        if self.abandoned:
            raise GenerationError("the request was freed")  # no further call
        return item

    def delivered(self) -> None:
        """The last callback has returned. It may have been the last because it said so."""
        self.cancel()
        self._delivered.set()

    def wait_delivered(self) -> None:
        """Returns when the last callback has."""
        if not self.done:
            self.refuse_endless_wait()
            self._delivered.wait()

    def wait(self) -> None:
        """The same; raises the failure of an answer that failed."""
        self.wait_delivered()
        if self.failure is not None:
            # A new object each time: several threads may wait, and an exception collects the traceback of each raise.
            kind = type(self.failure) if isinstance(self.failure, VllmError) else VllmError
            raise kind(str(self.failure)) from self.failure
