"""What the slot store counts, and the lines that say so.

Owns the counters' memory, the statistics line and its last printing: exactly once, when the process ends, whichever door it came in by.
Must not know what a slot is. Python prints the last line when it exits; a C host never ends its Python, so `libvllm` watches the same
memory and prints what Python has not (see `watch`).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Final

from vllm_cpp import log

NAMES: Final = ("steps", "hits", "misses", "evictions", "fills", "bytes", "exhausted", "advised")
PRINTED: Final = len(NAMES)
"""Word that is not 0 once the last line was printed, by whoever did."""
WORDS: Final = len(NAMES) + 1

_calloc = ctypes.CDLL(None).calloc
_calloc.restype = ctypes.c_void_p
_calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]


class Counters:
    """One int64 a name, then PRINTED, at one address for the life of the process."""

    def __init__(self) -> None:
        # Never freed: lanes and the C library use the address for longer than any Python object lives.
        self.address = int(_calloc(WORDS, 8))
        self.values = (ctypes.c_int64 * WORDS).from_address(self.address)

    def as_dict(self) -> dict[str, int]:
        return dict(zip(NAMES, self.values, strict=False))

    def line(self) -> str:
        return "[expert-stream] " + " ".join(f"{name}={value}" for name, value in self.as_dict().items())


class Report:
    """The lines of one store. The process has one at a time; a C library may ask to be told its counters' address."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._announce()

    def _announce(self) -> None:
        global _report
        _report = self
        for watcher in _watchers:
            watcher(self.counters.address)

    def end_step(self, every: int) -> None:
        """One model forward is over."""
        with self._lock:
            steps = self.counters.values[0] + 1
            self.counters.values[0] = steps
        if every and steps % every == 0:
            log.line(self.counters.line())

    def end(self) -> None:
        """The last line, unless it was printed; a forked child has nothing to say about its parent."""
        if os.getpid() == self._process and not self.counters.values[PRINTED]:
            self.counters.values[PRINTED] = 1
            log.line(self.counters.line())


_report: Report | None = None
_watchers: list[Callable[[int], None]] = []


def watch(watcher: Callable[[int], None]) -> None:
    """Call `watcher` with the address of the counters (int64[WORDS]) of the store there is, and of any that is built later."""
    _watchers.append(watcher)
    if _report is not None:
        watcher(_report.counters.address)


@atexit.register
def _end() -> None:
    if _report is not None:
        _report.end()
