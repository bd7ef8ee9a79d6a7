"""How far loading is, on a terminal.

Owns: one bar on stderr, redrawn a few times a second and taken away at the end. Must not know what loading does.

tqdm draws it through the library's status line, so that what is said meanwhile stands above the bar and is not torn by it.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any, Final

from vllm_cpp import log

_STDERR: Final = 2
_PARTS: Final = 1000
_FORMAT: Final = "{desc:<22} |{bar}| {percentage:3.0f}%"


class Bar:
    """A context manager; inside it, call the object with what is being done and how far it is, 0 to 1. Draws nothing if nobody watches."""

    def __init__(self) -> None:
        self._watched = os.isatty(_STDERR)
        self._bar: Any = None

    def __enter__(self) -> Bar:
        return self

    def __call__(self, what: str, fraction: float) -> None:
        if not self._watched:
            return
        done = int(_PARTS * min(max(fraction, 0.0), 1.0))
        if self._bar is None:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread of its own,
            tqdm.set_lock(threading.RLock())  # and no process for a lock between processes
            look = {"file": _StatusLine(), "leave": False, "ncols": _columns(), "bar_format": _FORMAT, "ascii": " #", "miniters": 1}
            self._bar = tqdm(total=_PARTS, initial=done, desc=what, **look)
        elif not self._bar.desc.startswith(what):
            self._bar.desc, self._bar.n, self._bar.last_print_n = what, done, done
            self._bar.refresh()
        else:
            self._bar.update(done - self._bar.n)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
            log.status("")


def _columns() -> int:
    """Of the terminal; one that has no size yet is as wide as most."""
    return os.get_terminal_size(_STDERR).columns or 80


class _StatusLine:
    """What tqdm takes for a file."""

    def write(self, text: str) -> int:
        log.status(text.strip())
        return len(text)

    def flush(self) -> None: ...

    def fileno(self) -> int:
        return _STDERR

    def isatty(self) -> bool:
        return True
