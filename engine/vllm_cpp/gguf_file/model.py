"""An opened model: one table of tensors and one set of key/values, from one file or a split set.

Owns the life of the mappings, and the merging of shards. Must not know architectures: whether a tensor *should* be there is asked by the
family that needs it, through need() and maybe().
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file.header import Header, walk
from vllm_cpp.gguf_file.mapped import MappedFile
from vllm_cpp.gguf_file.split import check_shard, check_total, shard_paths
from vllm_cpp.gguf_file.values import REQUIRED, KeyValues
from vllm_cpp.quants import Encoding

TOKENS_KEY = "tokenizer.ggml.tokens"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in numpy order: (rows, cols), towers (experts, rows, cols). `address` is that of its first byte
    in the mapping and holds until the model is closed; `file_offset` counts from the start of shard number `shard`."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    n_bytes: int
    shard: int
    file_offset: int
    address: int

    @property
    def row_bytes(self) -> int:
        return self.encoding.row_bytes(self.shape[-1])

    @property
    def slice_bytes(self) -> int:
        """Bytes of one expert's slice of a tower. Exact by construction: the header walk proved that all slices end inside the file."""
        return self.n_bytes // self.shape[0]


class GGUFModel:
    """The tensors and key/values of a model file or split set; a context manager. Key/values come from the first shard."""

    def __init__(self, path: str, shards: list[MappedFile], headers: list[Header]) -> None:
        self.path = path
        self.shards = shards
        self.version = headers[0].version
        self.kv = KeyValues(shards[0], headers[0].entries)
        self.tensors: dict[str, TensorInfo] = {}
        self.asked_for: set[str] = set()  # names that need() and maybe() were called with
        for number, (file, header) in enumerate(zip(shards, headers, strict=True)):
            for raw in header.tensors:
                if raw.name in self.tensors:
                    other = shards[self.tensors[raw.name].shard].path
                    raise ModelLoadError(f"{file.path}: tensor '{raw.name}' (byte {raw.described_at}) is already in {other}")
                self.tensors[raw.name] = TensorInfo(
                    raw.name, raw.shape, raw.encoding, raw.n_bytes, number, raw.offset, file.address + raw.offset
                )

    def __enter__(self) -> GGUFModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap. Every `address` is invalid from here on. Safe to call twice."""
        for shard in self.shards:
            shard.close()

    # -- key/values
    @property
    def architecture(self) -> str:
        return self.kv.get_str("general.architecture")

    def get_u32(self, key: str, default: Any = REQUIRED) -> Any:
        return self.kv.get_u32(key, default)

    def get_f32(self, key: str, default: Any = REQUIRED) -> Any:
        return self.kv.get_f32(key, default)

    def get_bool(self, key: str, default: Any = REQUIRED) -> Any:
        return self.kv.get_bool(key, default)

    def get_str(self, key: str, default: Any = REQUIRED) -> Any:
        return self.kv.get_str(key, default)

    def get_array(self, key: str, kind: str, default: Any = REQUIRED) -> Any:
        return self.kv.get_array(key, kind, default)

    def token_strings(self) -> list[str]:
        """The vocabulary's texts by token id, as they stand in the file (byte-level alphabets are not undone)."""
        return self.kv.get_array(TOKENS_KEY, "str")

    @property
    def num_tokens(self) -> int:
        """Length of the vocabulary, without decoding it; 0 if the file has none."""
        entry = self.kv.entry(TOKENS_KEY)
        return 0 if entry is None else max(entry.count, 0)

    # -- tensors
    def need(self, name: str, shape: tuple[int, ...], encodings: Iterable[str] = ()) -> TensorInfo:
        """The tensor, which must be there with this shape (and one of these encodings, if any are named)."""
        found = self.maybe(name, shape, encodings)
        if found is None:
            raise ModelLoadError(f"{self.path}: tensor '{name}' is missing; this model needs it with shape {_show(shape)}")
        return found

    def maybe(self, name: str, shape: tuple[int, ...], encodings: Iterable[str] = ()) -> TensorInfo | None:
        """The same for an optional tensor: None if absent, but one that is there has to fit. Leading ones do not count (the file has no
        way to tell a vector from a matrix of one row); the answer has the shape that was asked for."""
        self.asked_for.add(name)
        found = self.tensors.get(name)
        if found is None:
            return None
        if _without_leading_ones(found.shape) != _without_leading_ones(shape):
            raise self._tensor_error(found, f"has shape {_show(found.shape)}, expected {_show(shape)}")
        allowed = tuple(encodings)
        if allowed and found.encoding.name not in allowed:
            raise self._tensor_error(found, f"is {found.encoding.name}, expected {' or '.join(allowed)}")
        return replace(found, shape=tuple(shape))

    def bytes_of(self, name: str) -> np.ndarray:
        """A tensor's bytes as a read-only uint8 view of the mapping."""
        info = self.tensors[name]
        return self.shards[info.shard].bytes_at(info.file_offset, info.n_bytes)

    def _tensor_error(self, info: TensorInfo, text: str) -> ModelLoadError:
        return ModelLoadError(f"{self.shards[info.shard].path}: tensor '{info.name}' at byte {info.file_offset} {text}")


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    i = 0
    while i < len(shape) - 1 and shape[i] == 1:
        i += 1
    return tuple(shape[i:])


def _show(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(str(n) for n in shape) + ")"


def open_model(path: str | os.PathLike[str]) -> GGUFModel:
    """Open a GGUF file, or the whole split set that the named shard belongs to. Raises ModelLoadError, and leaves nothing open then."""
    named = os.fspath(path)
    if isinstance(named, bytes):
        named = os.fsdecode(named)
    shards: list[MappedFile] = []
    headers: list[Header] = []
    try:
        paths = shard_paths(named)
        for number, shard_path in enumerate(paths):
            shards.append(_open_shard(shard_path, named, len(paths)))
            headers.append(walk(shards[-1]))
            check_shard(KeyValues(shards[-1], headers[-1].entries), number, len(paths))
        check_total([KeyValues(s, h.entries) for s, h in zip(shards, headers, strict=True)], sum(len(h.tensors) for h in headers))
        return GGUFModel(named, shards, headers)
    except BaseException:
        for shard in shards:
            shard.close()
        raise


def _open_shard(path: str, named: str, count: int) -> MappedFile:
    try:
        return MappedFile(path)
    except ModelLoadError as error:
        if path == named:
            raise
        raise ModelLoadError(f"{error}; the name {named} asks for {count} shards side by side") from error
