"""How far loading is, on a terminal.

Owns: one line on stderr, redrawn a few times a second and taken away at the end. Must not know what loading does.
"""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Final

from vllm_cpp import log

_WIDTH: Final = 24
_PERIOD_S: Final = 0.05
_STDERR: Final = 2


class Bar:
    """A context manager; inside it, call the object with what is being done and how far it is, 0 to 1. Draws nothing if nobody watches."""

    def __init__(self) -> None:
        self._watched = _is_terminal()
        self._what = ""
        self._drawn = 0.0

    def __enter__(self) -> Bar:
        return self

    def __call__(self, what: str, fraction: float) -> None:
        now = time.monotonic()
        if self._watched and (what != self._what or now - self._drawn >= _PERIOD_S or fraction >= 1.0):
            self._what, self._drawn = what, now
            done = int(_WIDTH * min(max(fraction, 0.0), 1.0))
            log.status(f"[{'#' * done}{'.' * (_WIDTH - done)}] {what}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._watched:
            log.status("")


def _is_terminal() -> bool:
    try:
        return os.isatty(_STDERR)
    except OSError:
        return False
