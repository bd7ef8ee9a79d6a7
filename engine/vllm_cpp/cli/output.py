"""Standard output of vllm-cli: the answer, as UTF-8 whatever the locale.

Owns: writing it, and asking whether a person is there. Must not know what is written.
"""

from __future__ import annotations

import sys


def write(text: str) -> None:
    """Write at once; whoever reads along sees it now."""
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def is_terminal() -> bool:
    """Whether standard input is a person's terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_all() -> bytes:
    """Standard input to its end."""
    return b"" if sys.stdin is None else sys.stdin.buffer.read()
