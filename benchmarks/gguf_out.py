"""Writes a GGUF file tensor by tensor, so that models far larger than memory can be made.

Owns the byte layout of a written file. Must not know where bytes come from, nor what they mean. Key/values of an existing model are
carried over byte for byte, and nothing depends on a package's version: the same call gives the same file, whose SHA-256 can be pinned.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_cpp.gguf_file import GGUFModel
from vllm_cpp.gguf_file.values import ARRAY, BOOL, FLOAT32, STRING, UINT32

ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """One tensor to write. `shape` is in numpy order; `parts` makes the bytes, piece by piece, when their turn comes."""

    name: str
    shape: tuple[int, ...]
    encoding_id: int
    n_bytes: int
    parts: Callable[[], Iterator[np.ndarray]]


def kept(model: GGUFModel, name: str) -> Plan:
    """A tensor of `model` as it stands."""
    info = model.tensors[name]
    return Plan(name, info.shape, info.encoding.ggml_id, info.n_bytes, lambda: iter([model.bytes_of(name)]))


def key_values(model: GGUFModel, skip: tuple[str, ...] = ()) -> list[bytes]:
    """Every key of `model` but those in `skip`, as it stands in the file."""
    file = model.shards[0]
    rows = []
    for key in model.kv:
        entry = model.kv.entry(key)
        if key not in skip:
            kind = struct.pack("<I", entry.tid) if entry.count < 0 else struct.pack("<IIQ", ARRAY, entry.tid, entry.count)
            rows.append(_string(key) + kind + file.bytes_at(entry.start, entry.end - entry.start).tobytes())
    return rows


def u32(key: str, value: int) -> bytes:
    return _string(key) + struct.pack("<II", UINT32, value)


def f32(key: str, value: float) -> bytes:
    return _string(key) + struct.pack("<If", FLOAT32, value)


def bool_(key: str, *, value: bool) -> bytes:
    return _string(key) + struct.pack("<I?", BOOL, value)


def array(key: str, element: int, packed: list[bytes]) -> bytes:
    """An array of values that are packed already; `element` is their type."""
    return _string(key) + struct.pack("<IIQ", ARRAY, element, len(packed)) + b"".join(packed)


def text(key: str, value: str) -> bytes:
    return _string(key) + struct.pack("<I", STRING) + _string(value)


def write(path: Path, key_values: list[bytes], plans: list[Plan]) -> None:
    """Write the file under another name and move it: a writer that was interrupted must not leave a model behind."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(plans), len(key_values)) + b"".join(key_values))
        offset = 0
        for plan in plans:
            dims = plan.shape[::-1]
            file.write(_string(plan.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, plan.encoding_id, offset))
            offset += plan.n_bytes + -plan.n_bytes % ALIGNMENT
        for plan in plans:
            file.write(bytes(-file.tell() % ALIGNMENT))
            start = file.tell()
            for part in plan.parts():
                file.write(np.ascontiguousarray(part).data)
            if file.tell() - start != plan.n_bytes:
                raise ValueError(f"tensor '{plan.name}' came to {file.tell() - start} bytes, its entry says {plan.n_bytes}")
        file.write(bytes(-file.tell() % ALIGNMENT))
    partial.replace(path)


def _string(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw
