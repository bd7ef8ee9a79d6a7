"""Checks shared by the parameter classes.

Owns: the wording of "this field holds that value and must be so". Must not know any field.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import os
from collections.abc import Iterable
from typing import Any, TypeVar

from vllm_cpp.errors import InvalidArgumentError, UnknownKeywordError

_T = TypeVar("_T")


def shown(value: object) -> str:
    """A value as it appears in an error: its repr, cut so that a megabyte of caller's text stays readable."""
    try:
        text = repr(value)
    except ValueError:  # an int beyond Python's limit of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "…"


def integer(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int within [low, high]; a bool is not an integer here."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidArgumentError(f"{name} must be an integer, not {shown(value)}")
    if not low <= value <= high:
        raise InvalidArgumentError(f"{name} must be between {low} and {high}, not {shown(value)}")
    return int(value)


def number(name: str, value: object) -> float:
    """`value` as a finite float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidArgumentError(f"{name} must be a number, not {shown(value)}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise InvalidArgumentError(f"{name} must be finite, not {shown(value)}")
    return result


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be True or False, not {shown(value)}")
    return value


def optional_text(name: str, value: object) -> str | None:
    """`value` as a str; None and "" both mean unset, as a C caller may pass either."""
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{name} must be a string, not {shown(value)}")
    return value


def items(name: str, value: object) -> tuple[Any, ...]:
    """The items of a sequence. Text and bytes are sequences to Python, but nobody means their letters one by one."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray):
        raise InvalidArgumentError(f"{name} must be a sequence, not {shown(value)}")
    return tuple(value)


def path_text(function: str, value: object) -> str:
    """`value` as the text of a path."""
    try:
        return os.fsdecode(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(f"{function} takes the path of a model, not {shown(value)}") from None


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError(f"{name} is {shown(value)}, which is not one of: {' '.join(choices)}")
    return value


def only_by_name(cls: type[_T]) -> type[_T]:
    """Make a dataclass refuse a keyword it does not know, or a value without one, as every other door does: Python's own TypeError names
    no nearest one, and is no VllmError."""
    init: Any = cls.__init__
    names = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    @functools.wraps(init)
    def refusing(self: _T, *values: object, **keywords: object) -> None:
        if values:
            raise InvalidArgumentError(f"{cls.__name__} takes its parameters by name ({names[0]}=…), not {shown(values[0])}")
        refuse_unknown(cls.__name__, keywords, names)
        init(self, **keywords)

    cls.__init__ = refusing  # type: ignore[method-assign]
    return cls


def refuse_unknown(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse the first keyword that is not known, naming the nearest that is."""
    known = tuple(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f" (it takes: {' '.join(known)})"
            raise UnknownKeywordError(f"{function} has no parameter {name!r}{hint}")
