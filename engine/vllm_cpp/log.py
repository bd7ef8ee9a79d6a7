"""The library's voice on stderr.

Owns: whole lines on file descriptor 2, each in one write so that lines of several threads (and of the host program) never interleave,
the status line of a terminal, and the memory of what was said once. Must not know what is said or why, and nothing else in the package
may write to stderr. The descriptor is written directly: a C host has no use for Python's buffered `sys.stderr`, and may have replaced or
closed it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

_STDERR = 2
_CLEAR_LINE = b"\r\x1b[K"
_SAID_MOST = 512  # a process that serves may see any number of documents
_said: OrderedDict[str, None] = OrderedDict()
_said_lock = threading.Lock()
_status = b""  # what `status` shows at the moment


def _encoded(text: str) -> bytes:
    # A path that is not UTF-8 reaches us with surrogates standing for its bytes: print those bytes, and never fail for any other.
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def _write(data: bytes) -> None:
    # A closed or full stderr loses what was said; it never raises.
    try:
        while data:
            data = data[os.write(_STDERR, data) :]
    except OSError:
        pass


def line(text: str) -> None:
    """Write `text` and a newline to stderr, above a status line that is showing."""
    whole = _encoded(text) + b"\n"
    _write(_CLEAR_LINE + whole + _status if _status else whole)


def status(text: str) -> None:
    """Show `text` as the one line that is rewritten in place; "" takes it away. Only for a stderr that is a terminal."""
    global _status
    if text or _status:
        _status = _encoded(text)
        _write(_CLEAR_LINE + _status)


def warn(text: str) -> None:
    """Write a warning. One spelling for all of them, so that a user can grep for it."""
    line(f"vllm: warning: {text}")


def once(key: str, text: str) -> bool:
    """Write `text` the first time `key` is seen in this process; say whether it was written. Of many keys, those seen last are known."""
    with _said_lock:
        new = key not in _said
        _said[key] = None
        _said.move_to_end(key)
        if len(_said) > _SAID_MOST:
            _said.popitem(last=False)
    if not new:
        return False
    line(text)
    return True


def forget() -> None:
    """Forget what was said. For tests, which want to hear it again."""
    with _said_lock:
        _said.clear()
