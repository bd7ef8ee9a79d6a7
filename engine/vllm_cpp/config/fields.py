"""Checks shared by the parameter classes.

Owns: the wording of "this field holds that value and must be so". Must not know any field.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable

from vllm_cpp.errors import InvalidArgumentError, UnknownKeywordError


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


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError(f"{name} is {shown(value)}, which is not one of: {' '.join(choices)}")
    return value


def refuse_unknown(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse the first keyword that is not known, naming the nearest that is."""
    known = tuple(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f" (it takes: {' '.join(known)})"
            raise UnknownKeywordError(f"{function} has no parameter {name!r}{hint}")
