"""Key/values of a GGUF header: where each one lies, decoded when somebody asks.

Owns the value types, the decoding, and the typed getters that refuse a wrong type by the key's name. Must not know which keys exist or
what they mean. Decoding late is what makes opening fast: a vocabulary of 150,000 strings is skipped over, and read once by the tokenizer.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file.mapped import MappedFile

STRING, ARRAY, BOOL, UINT32, INT32, FLOAT32 = 8, 9, 7, 4, 5, 6
# type id -> (name, numpy type); strings and arrays have no fixed size
SCALARS: dict[int, tuple[str, str]] = {
    0: ("u8", "<u1"),
    1: ("i8", "<i1"),
    2: ("u16", "<u2"),
    3: ("i16", "<i2"),
    4: ("u32", "<u4"),
    5: ("i32", "<i4"),
    6: ("f32", "<f4"),
    7: ("bool", "|b1"),
    10: ("u64", "<u8"),
    11: ("i64", "<i8"),
    12: ("f64", "<f8"),
}
SCALAR_BYTES = {tid: np.dtype(code).itemsize for tid, (_, code) in SCALARS.items()}
INTEGERS = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
FLOATS = ("f32", "f64")

LENGTH = struct.Struct("<Q")
REQUIRED: Any = object()  # the default of a getter whose key must be there


def type_name(tid: int) -> str:
    return {STRING: "str", ARRAY: "array"}.get(tid) or SCALARS[tid][0]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key's value: its type (of the elements, for an array), how many, and where the bytes start and end in the file."""

    tid: int
    count: int  # -1: not an array
    start: int
    end: int

    @property
    def kind(self) -> str:
        return type_name(self.tid) if self.count < 0 else f"array of {type_name(self.tid)}"


class KeyValues(Mapping[str, Any]):
    """Mapping of key to int, float, bool, str, numpy array, or list of str; each decoded at first use and kept."""

    def __init__(self, file: MappedFile, entries: dict[str, Entry]) -> None:
        self._file = file
        self._entries = entries
        self._decoded: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries  # Mapping's own would decode the value

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = self._decode(key, self._entries[key])
        return self._decoded[key]

    def entry(self, key: str) -> Entry | None:
        """Type and place of a value without decoding it."""
        return self._entries.get(key)

    def error(self, key: str, text: str) -> ModelLoadError:
        entry = self._entries.get(key)
        at = f" at byte {entry.start}" if entry else ""
        return ModelLoadError(f"{self._file.path}: key '{key}'{at}: {text}")

    # -- decoding
    def _decode(self, key: str, entry: Entry) -> Any:
        if self._file.closed:
            raise ModelLoadError(f"{self._file.path}: key '{key}' was asked for after the model was closed")
        if entry.tid == STRING:
            return self.text(key) if entry.count < 0 else self._strings(key, entry)
        values = np.frombuffer(self._file.view[entry.start : entry.end], SCALARS[entry.tid][1])
        return values[0].item() if entry.count < 0 else values.copy()  # a copy, so that no value keeps the mapping alive

    def text(self, key: str) -> str:
        entry = self._entries[key]
        raw = bytes(self._file.view[entry.start + 8 : entry.end])
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(key, f"not UTF-8: {error}") from error

    def _strings(self, key: str, entry: Entry) -> list[str]:
        raw = bytes(self._file.view[entry.start : entry.end])
        length_at = LENGTH.unpack_from
        out: list[str] = []
        at = 0
        try:
            for _ in range(entry.count):
                begin = at + 8
                at = begin + length_at(raw, at)[0]
                out.append(raw[begin:at].decode())
        except UnicodeDecodeError as error:
            raise self.error(key, f"element {len(out)} at byte {entry.start + begin} is not UTF-8: {error}") from error
        return out

    # -- typed getters
    def _found(self, key: str, kinds: tuple[str, ...], wanted: str, default: Any) -> bool:
        """False if the key is absent and has a default; a value of another type is refused."""
        entry = self._entries.get(key)
        if entry is None:
            if default is REQUIRED:
                raise self.error(key, f"missing; this model needs it ({wanted})")
            return False
        if entry.kind not in kinds:
            raise self.error(key, f"is {entry.kind}, expected {wanted}")
        return True

    def get_u32(self, key: str, default: Any = REQUIRED) -> Any:
        """A count. Any integer width is taken as long as the value fits: the width is the converter's choice, the range is not."""
        if not self._found(key, INTEGERS, "an unsigned 32-bit integer", default):
            return default
        value = self[key]
        if not 0 <= value < 1 << 32:
            raise self.error(key, f"is {value}, expected 0 to {(1 << 32) - 1}")
        return value

    def get_f32(self, key: str, default: Any = REQUIRED) -> Any:
        if not self._found(key, FLOATS, "a 32-bit float", default):
            return default
        value = self[key]
        if not math.isfinite(value):
            raise self.error(key, f"is {value}, expected a finite number")
        return value

    def get_bool(self, key: str, default: Any = REQUIRED) -> Any:
        return self[key] if self._found(key, ("bool",), "a bool", default) else default

    def get_str(self, key: str, default: Any = REQUIRED) -> Any:
        return self[key] if self._found(key, ("str",), "a string", default) else default

    def get_array(self, key: str, kind: str, default: Any = REQUIRED) -> Any:
        """An array whose elements are of `kind`: "str" gives list[str], a scalar type's name its numpy array, "int" any integer type."""
        kinds = INTEGERS if kind == "int" else (kind,)
        return self[key] if self._found(key, tuple(f"array of {k}" for k in kinds), f"an array of {kind}", default) else default

    def is_array(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.count >= 0
