"""Reading a JSON document whose every mistake must be named.

Owns: text or dict to objects, with duplicate keys, oversized numbers and broken encodings kept visible until the walk can name their path;
the typed getters and the words of their refusals. Must not know which keys exist.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from vllm_cpp.config.fields import shown
from vllm_cpp.errors import InvalidArgumentError

MAX_DOCUMENT_BYTES: Final = 1 << 20
"""A document is a few lines; this is far more, and bounds the time any mistake can take."""

_BLANK: Final = " \t\r\n"
_MAX_INT: Final = 2**63 - 1
_MAX_INT_DIGITS: Final = 40  # longer numbers are read as floats, which no integer field accepts; Python itself refuses 4301 digits


def refusal(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"offload config: {text}")


def printable(key: object) -> str:
    """A key as it stands between the quotes of a message: control characters escaped, cut when absurdly long."""
    text = key if isinstance(key, str) else repr(key)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    text = json.dumps(text, ensure_ascii=False)[1:-1]
    return text if len(text) <= 120 else text[:117] + "…"


def join(path: str, key: object) -> str:
    return f"{path}.{printable(key)}" if path else printable(key)


class _Pairs(dict[str, Any]):
    """A JSON object that remembers a key it was given twice: the last one would win silently."""

    duplicate: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _Pairs:
    result = _Pairs()
    for key, value in pairs:
        if key in result and result.duplicate is None:
            result.duplicate = key
        result[key] = value
    return result


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_INT_DIGITS else float(digits)


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def load(document: str | bytes | dict[str, Any] | None) -> dict[str, Any]:
    """The document's top-level object; {} for None and for blank text."""
    if document is None:
        return {}
    if isinstance(document, dict):
        return document
    if not isinstance(document, str | bytes):
        raise refusal(f"must be JSON text or a dict, not {shown(document)}")
    try:
        data = document.encode("utf-8") if isinstance(document, str) else document
        text = data.decode("utf-8")
    except UnicodeError:
        raise refusal("malformed JSON: the text is not valid UTF-8") from None
    if len(data) > MAX_DOCUMENT_BYTES:
        raise refusal(f"malformed JSON: {len(data)} bytes, and a document may have {MAX_DOCUMENT_BYTES}")
    if not text.strip(_BLANK):
        return {}
    try:
        parsed = json.loads(text, object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)
    except RecursionError:
        raise refusal("malformed JSON: nested too deeply") from None
    except ValueError as error:
        raise refusal(f"malformed JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise refusal("must be a JSON object")
    return parsed


class Reader:
    """One object of the document and its path; every getter answers None for an absent or null key."""

    def __init__(self, values: dict[str, Any], path: str, known: Sequence[str]) -> None:
        duplicate = getattr(values, "duplicate", None)
        if duplicate is not None:
            raise refusal(f'duplicate key "{join(path, duplicate)}"')
        unknown = sorted(str(key) for key in values if key not in known)
        if unknown:
            raise refusal(f'unknown key "{join(path, unknown[0])}" (expected one of: {" ".join(known)})')
        self._values = values
        self.path = path

    def child(self, key: str, known: Sequence[str]) -> Reader:
        """The object under `key`; an absent one reads as empty."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise refusal(f'"{join(self.path, key)}" must be a JSON object')
        return Reader(value or {}, join(self.path, key), known)

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def boolean(self, key: str) -> bool | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise refusal(f'"{join(self.path, key)}" must be a boolean')
        return value

    def integer(self, key: str, named: str | None = None) -> int | None:
        """A JSON integer that 64 bits can hold: 8000.0 and "8000" are none. `named` replaces the path in a refusal."""
        value = self._values.get(key)
        name = named or join(self.path, key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise refusal(f'"{name}" must be an integer')
        if not -_MAX_INT <= value <= _MAX_INT:
            raise refusal(f'"{name}" must fit in 64 bits (got {shown(value)})')
        return value

    def positive(self, key: str) -> int | None:
        value = self.integer(key)
        if value is not None and value <= 0:
            raise refusal(f'"{join(self.path, key)}" must be positive (got {value})')
        return value

    def not_negative(self, key: str, meaning_of_zero: str = "") -> int | None:
        value = self.integer(key)
        if value is not None and value < 0:
            raise refusal(f'"{join(self.path, key)}" must not be negative (got {value}){meaning_of_zero}')
        return value

    def number(self, key: str) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refusal(f'"{key}" must be a number')
        try:
            return float(value)
        except OverflowError:  # an int from a dict that no float can hold
            return float("inf") if value > 0 else float("-inf")

    def strings(self, key: str) -> frozenset[str]:
        value = self._values.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(item, str) for item in value):
            raise refusal(f'"{key}" must be an array of strings')
        return frozenset(value)
