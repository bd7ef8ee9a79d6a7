"""The library's voice on stderr.

Owns: whole lines on file descriptor 2, each in one write so that lines of several threads (and of the host program) never interleave,
and the memory of what was said once. Must not know what is said or why, and nothing else in the package may write to stderr.
The descriptor is written directly: a C host has no use for Python's buffered `sys.stderr`, and may have replaced or closed it.
"""

from __future__ import annotations

import os
import threading

_STDERR = 2
_said: set[str] = set()
_said_lock = threading.Lock()


def _encoded(text: str) -> bytes:
    # A path that is not UTF-8 reaches us with surrogates standing for its bytes: print those bytes, and never fail for any other.
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def line(text: str) -> None:
    """Write `text` and a newline to stderr. A closed or full stderr loses the line; it never raises."""
    rest = _encoded(text) + b"\n"
    try:
        while rest:
            rest = rest[os.write(_STDERR, rest) :]
    except OSError:
        pass


def warn(text: str) -> None:
    """Write a warning. One spelling for all of them, so that a user can grep for it."""
    line(f"vllm: warning: {text}")


def once(key: str, text: str) -> bool:
    """Write `text` the first time `key` is seen in this process; say whether it was written."""
    with _said_lock:
        if key in _said:
            return False
        _said.add(key)
    line(text)
    return True


def forget() -> None:
    """Forget what was said. For tests, which want to hear it again."""
    with _said_lock:
        _said.clear()
