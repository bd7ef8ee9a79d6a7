"""What running a chat template may cost.

Owns the budget of one rendering and the measuring that is paid from it: loop turns, calls and everything large that is made. Must not know
jinja2's ways, only values. The limits are far above what templates in use need (the longest conversation that fits a context of a million
tokens is a few million characters), and far below what would trouble a host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import ItemsView, Iterable, KeysView, ValuesView
from types import GeneratorType
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.utils import Namespace

MAX_TEXT = 1 << 23  # characters of any one text
MAX_ITEMS = 1 << 20  # elements of any one list
MAX_WORK = 4_000_000  # loop turns and calls, and what is made at the rates below
MAX_SECONDS = 10.0  # for what the count cannot see, such as searching a long list again and again
MAX_INT_BITS = 4096
MAX_WIDTH = 4096  # of padding, indentation and number formats
_CHARS_A_UNIT, _ITEMS_A_UNIT = 64, 16

_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView, Namespace)


class BudgetError(TemplateError):
    """The template wanted more time or memory than it may have."""


class Meter:
    """One budget for each thread that renders."""

    def __init__(self) -> None:
        self._account = threading.local()

    def start(self) -> None:
        """Give the calling thread a full budget."""
        self._account.left = MAX_WORK
        self._account.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, units: int) -> None:
        account = self._account
        account.left -= units
        if account.left < 0 or time.monotonic() > account.deadline:
            raise BudgetError(f"it does too much work (over {MAX_WORK} loop turns or calls, or {MAX_SECONDS:.0f} s)")

    def text(self, length: int) -> None:
        """Pay for a text of this length, before it is made."""
        if length > MAX_TEXT:
            raise BudgetError(f"it makes a text of over {MAX_TEXT} characters")
        self.spend(length // _CHARS_A_UNIT)

    def join(self, parts: Iterable[str]) -> str:
        """The parts joined; it stops taking them when they are too long together."""
        kept, length = [], 0
        for part in parts:
            kept.append(part)
            length += len(part)
            if length > MAX_TEXT:
                break
        self.text(length)
        return "".join(kept)

    def items(self, count: int) -> None:
        if count > MAX_ITEMS:
            raise BudgetError(f"it makes a list of over {MAX_ITEMS} elements")
        self.spend(count // _ITEMS_A_UNIT)

    def integer(self, bits: int) -> None:
        if bits > MAX_INT_BITS:
            raise BudgetError(f"it makes a number of over {MAX_INT_BITS} bits")

    def widths(self, *values: Any) -> None:
        """Refuse padding or indentation by a large number, or by a long text."""
        for value in values:
            if (isinstance(value, int) and abs(value) > MAX_WIDTH) or (isinstance(value, str) and len(value) > MAX_WIDTH):
                raise BudgetError(f"it pads, indents or rounds by over {MAX_WIDTH}")

    def result(self, value: Any) -> Any:
        """The value, paid for; a generator as a list, so that it cannot do its work unseen."""
        if isinstance(value, GeneratorType):
            listed = []
            for item in value:
                self.spend(1)
                listed.append(item)
            return listed
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, (list, tuple, dict, set)):
            self.items(len(value))
        return value

    def walkable(self, value: Any) -> Any:
        """The value, after finding that it can be spelled out, compared or hashed. A list may hold another many times, and that one a
        third, so that what is small in memory is endless to walk; it is paid for as if all of it were there."""
        if not isinstance(value, _CONTAINERS):
            return value
        length = 0
        waiting: list[Any] = [value]
        while waiting:
            part = waiting.pop()
            self.spend(1)
            if isinstance(part, str):
                length += len(part)
                if length > MAX_TEXT:
                    break
            elif isinstance(part, Namespace):
                waiting.append(object.__getattribute__(part, "_Namespace__attrs"))
            elif isinstance(part, _CONTAINERS):
                waiting += [*part.keys(), *part.values()] if isinstance(part, dict) else part
                self.items(len(waiting))
        self.text(length)
        return value

    def shown(self, value: Any) -> str:
        """str() of the value, if that is not too long."""
        return value if isinstance(value, str) else str(self.walkable(value))
