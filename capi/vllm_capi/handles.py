"""Handles: the numbers that C holds instead of objects.

Owns the table from number to object. A number is never used twice, so a handle used after its free is found out and refused, where a
pointer would crash the host. Must not know what the objects do.
"""

from __future__ import annotations

import itertools
from typing import Any

from vllm_cpp.errors import InvalidArgumentError

# Multiples of 16 well above 0: like addresses, so that they survive hosts that tag pointers or treat small ones as errors.
_FIRST, _STEP = 0x10000, 0x10


class HandleTable:
    """Maps handles to objects of a kind. Each operation is one dict operation, so any thread may call at any time."""

    def __init__(self) -> None:
        self._ids = itertools.count(_FIRST, _STEP)
        self._entries: dict[int, tuple[str, Any]] = {}

    def add(self, kind: str, thing: Any) -> int:
        handle = next(self._ids)
        self._entries[handle] = (kind, thing)
        return handle

    def get(self, handle: int, *kinds: str) -> Any:
        """The object of a live handle of one of these kinds."""
        kind, thing = self._entries.get(handle, ("", None))
        if kind not in kinds:
            raise InvalidArgumentError(f"{handle:#x} is not a live {kinds[0]} handle: it was freed already, or is something else")
        return thing

    def find(self, handle: int, kind: str) -> Any:
        """The object of a handle, or None when it is not a live one of that kind."""
        found, thing = self._entries.get(handle, ("", None))
        return thing if found == kind else None

    def pop(self, handle: int, kind: str) -> Any:
        """The object of a handle, which ends with this; None when it is not a live one of that kind."""
        if self._entries.get(handle, ("", None))[0] != kind:
            return None
        return self._entries.pop(handle, ("", None))[1]

    def __len__(self) -> int:
        return len(self._entries)
