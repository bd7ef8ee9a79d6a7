"""Porters: library threads that carry out what is too heavy for a caller's thread.

A C caller may have a stack of 64 KiB, signal handlers that must not wait, and no patience for a thread that numba or the regular-expression
engine recurses on. So whatever imports, loads, tokenizes, renders or closes runs here, and the caller sleeps until it is done. Must not
know what it runs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vllm_cpp.errors import GenerationError
from vllm_cpp.request import LibraryThread

_MOST_IDLE = 8


class Porters:
    """Runs functions on threads of its own, one each, as many at once as there are callers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def run(self, function: Callable[..., Any], *arguments: Any, unwanted: Callable[[Any], None] | None = None) -> Any:
        """The function's result, or what it raised. A caller who is interrupted meanwhile leaves; the result then goes to `unwanted`."""
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        left = threading.Event()

        def give_up() -> None:
            # Both sides may come here; the queue hands the answer to one of them.
            with suppress(Exception):  # queue.Empty, and what there is nobody to tell
                succeeded, result = answer.get_nowait()
                if succeeded and unwanted is not None:
                    unwanted(result)

        def task() -> None:
            try:
                answer.put((True, function(*arguments)))
            except BaseException as error:  # noqa: BLE001 - it is the caller's, who raises it
                answer.put((False, error))
            if left.is_set():
                give_up()

        try:
            self.start(task)
            succeeded, result = answer.get()
        except BaseException:  # the host's Ctrl-C, say
            left.set()
            with suppress(GenerationError):
                self.start(give_up)
            raise
        if not succeeded:
            raise result
        return result

    def start(self, task: Callable[[], None]) -> None:
        """Runs a task that raises nothing, and does not wait for it."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is not None:
            inbox.put(task)
            return
        inbox = queue.SimpleQueue()
        inbox.put(task)
        try:
            LibraryThread(lambda: self._work(inbox), "vllm-porter").start()
        except RuntimeError as error:  # the process may start no more threads
            raise GenerationError(f"no thread could be started for this call: {error}; let others end first, or raise the limit") from error

    def _work(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            task = inbox.get()
            task()
            del task  # or it would keep the caller's arguments alive until the next one comes
            with self._lock:
                if len(self._idle) >= _MOST_IDLE:
                    return
                self._idle.append(inbox)
