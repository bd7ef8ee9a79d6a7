"""GGUF bytes, written field by field.

Owns the serialization only. It shares no code with the reader under test, and lets a test write what no honest writer would: every
function returns plain bytes to be cut, swapped and glued.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 32
# kind -> (type id in the file, struct code)
KINDS = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "?"),
    "str": (8, ""),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}
ARRAY = 9


@dataclass(frozen=True)
class Stored:
    """A tensor ready for the file: dims in file order (columns first), ggml type id, data."""

    dims: tuple[int, ...]
    ggml_id: int
    data: bytes


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def kind_of(value: Any) -> str:
    """The kind a converter would choose."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "u32"
    return "f32" if isinstance(value, float) else "str"


def value(v: Any, kind: str | None = None) -> bytes:
    """A value with its type in front. Lists become arrays of `kind`; lists of int are i32 unless told otherwise, as converters have it."""
    if isinstance(v, (list, tuple)):
        if kind is None:
            kind = kind_of(v[0]) if v else "i32"
            kind = "i32" if kind == "u32" else kind
        return struct.pack("<IIQ", ARRAY, KINDS[kind][0], len(v)) + b"".join(_scalar(x, kind) for x in v)
    kind = kind or kind_of(v)
    return struct.pack("<I", KINDS[kind][0]) + _scalar(v, kind)


def _scalar(v: Any, kind: str) -> bytes:
    return string(v) if kind == "str" else struct.pack("<" + KINDS[kind][1], v)


def start(n_tensors: int, n_kvs: int, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, n_tensors, n_kvs)


def describe(name: str | bytes, dims: Sequence[int], ggml_id: int, offset: int) -> bytes:
    """A row of the tensor table."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, ggml_id, offset)


def pad(data: bytes, alignment: int = ALIGNMENT) -> bytes:
    return data + bytes(-len(data) % alignment)


def file_bytes(kvs: Mapping[str, bytes], tensors: Mapping[str, Stored], version: int = 3, alignment: int = ALIGNMENT) -> bytes:
    """A whole file from values (already with their types in front) and tensors."""
    head = [start(len(tensors), len(kvs), version)]
    head += [string(key) + v for key, v in kvs.items()]
    body: list[bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        head.append(describe(name, tensor.dims, tensor.ggml_id, offset))
        body.append(pad(tensor.data, alignment))
        offset += len(body[-1])
    return pad(b"".join(head), alignment) + b"".join(body)


def write_shards(
    path: Path, shards: int, kvs: Mapping[str, bytes], tensors: Mapping[str, Stored], *, first_empty: bool = False
) -> list[Path]:
    """Write a split set the way llama-gguf-split does: key/values in the first file, `split.*` in all. `first_empty` is its
    --no-tensor-first-split: the first file holds no tensors."""
    names = list(tensors)
    n_parts = shards - first_empty
    cuts = [0] * first_empty + [len(names) * i // n_parts for i in range(n_parts + 1)]
    stem = path.name.removesuffix(".gguf")
    paths = []
    for i in range(shards):
        split = {"split.no": value(i, "u16"), "split.count": value(shards, "u16"), "split.tensors.count": value(len(names), "i32")}
        part = {n: tensors[n] for n in names[cuts[i] : cuts[i + 1]]}
        paths.append(path.with_name(f"{stem}-{i + 1:05d}-of-{shards:05d}.gguf"))
        paths[-1].write_bytes(file_bytes({**kvs, **split} if i == 0 else split, part))
    return paths


def as_bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()
