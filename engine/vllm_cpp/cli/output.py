"""Standard output of vllm-cli: the answer, as UTF-8 whatever the locale.

Owns: writing it, and asking whether a person is there. Must not know what is written.
"""

from __future__ import annotations

import errno
import os
import sys


class OutputError(Exception):
    """The answer has nowhere to go: standard output is closed, or its disk is full."""


def write(text: str) -> None:
    """Write at once; whoever reads along sees it now. Unbuffered, so that a failed write is not tried again at exit."""
    data = text.encode("utf-8", "replace")
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error}") from None


def is_terminal() -> bool:
    """Whether standard input is a person's terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_all() -> bytes:
    """Standard input to its end."""
    return b"" if sys.stdin is None else sys.stdin.buffer.read()
