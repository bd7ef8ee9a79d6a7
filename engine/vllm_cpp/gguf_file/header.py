"""The walk over one file's GGUF header.

Owns the order of fields, and every check that needs one file only. Must not know split sets, models or keys, but for
`general.alignment`, which moves the data. Two rules hold throughout: a count is compared with the bytes that remain before it is
looped over, and nothing here touches a byte of tensor data.

Stricter than llama.cpp, on purpose: dimensions of zero, tensors without dimensions or name, names that are not UTF-8, bools other than
0 and 1, and alignments over 64 KiB are refused (no model has them, and most have been a bug somewhere). As strict: offsets must be the
running padded sum, which also rules out overlaps. Nothing that llama.cpp refuses is taken.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file.mapped import MappedFile
from vllm_cpp.gguf_file.values import ARRAY, BOOL, LENGTH, SCALAR_BYTES, STRING, UINT32, Entry
from vllm_cpp.quants import Encoding, by_id

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MAX_DIMS = 4
MAX_NAME_BYTES = 63
MAX_KEY_BYTES = 65535
MAX_INT64 = (1 << 63) - 1
MIN_KV_BYTES = 8 + 1 + 4 + 1  # key length, a key of one byte, type, a value of one byte
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, a name of one byte, n_dims, one dimension, type, offset
# What remains bounds a loop by the size of the file, and files are large. These bound it by what a model can want (each is over ten
# times what any published model has), so that a hostile file costs a second at most.
MAX_KVS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_STRINGS = 1 << 22

FOREIGN = (  # what people pass by mistake, told by the first bytes
    (b"version https://git-lfs", "a Git LFS pointer, not the model itself: fetch the file with `git lfs pull`"),
    (b"ggml", "a GGML file from before GGUF: convert it again"),
    (b"lmgg", "a GGML file from before GGUF: convert it again"),
    (b"tjgg", "a GGJT file from before GGUF: convert it again"),
    (b"fmgg", "a GGMF file from before GGUF: convert it again"),
    (b"PK\x03\x04", "a zip archive or a PyTorch checkpoint: convert it to GGUF"),
    (b"<", "text that looks like a web page; the download may have failed"),
)

U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as the header tells it, checked: shape in numpy order, `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    n_bytes: int
    offset: int
    described_at: int


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    alignment: int
    entries: dict[str, Entry]
    tensors: list[RawTensor]
    data_offset: int


class _Cursor:
    """A place in the file that only moves forward and never past the end."""

    def __init__(self, file: MappedFile) -> None:
        self.path, self.view, self.end, self.at = file.path, file.view, file.size, 0

    def error(self, text: str, at: int | None = None) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {text} (byte {self.at if at is None else at} of {self.end})")

    def claim(self, size: int, what: str) -> int:
        """Step over `size` bytes that must be there; returns where they start."""
        start = self.at
        if size > self.end - start:
            raise self.error(f"{what} needs {size} bytes, but {self.end - start} remain")
        self.at = start + size
        return start

    def u32(self, what: str) -> int:
        return U32.unpack_from(self.view, self.claim(4, what))[0]

    def u64(self, what: str) -> int:
        return LENGTH.unpack_from(self.view, self.claim(8, what))[0]

    def text(self, what: str, limit: int) -> str:
        """A short string that names something: 1 to `limit` bytes of UTF-8."""
        start = self.at
        size = self.u64(f"the length of {what}")
        if not 1 <= size <= limit:
            raise self.error(f"{what} has a length of {size} bytes, expected 1 to {limit}", start)
        raw = bytes(self.view[self.claim(size, what) : self.at])
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error}", start) from error

    def count(self, what: str, least_bytes: int, limit: int) -> int:
        """How many records follow; refused when they could not fit or are absurd. Call before the records' own bytes are reached."""
        start = self.at
        n = self.u64(f"the number of {what}")
        if n > (self.end - self.at) // least_bytes:
            raise self.error(
                f"{n} {what} of at least {least_bytes} bytes each cannot fit into the {self.end - self.at} bytes that remain", start
            )
        if n > limit:
            raise self.error(f"{n} {what}, expected at most {limit}", start)
        return n


def walk(file: MappedFile) -> Header:
    """Read and check the header of one file."""
    cursor = _Cursor(file)
    version = _version(cursor)
    n_tensors = cursor.count("tensors", MIN_TENSOR_BYTES, MAX_TENSORS)
    n_kvs = cursor.count("key-values", MIN_KV_BYTES, MAX_KVS)
    entries: dict[str, Entry] = {}
    for i in range(n_kvs):
        start = cursor.at
        key = cursor.text(f"key {i}", MAX_KEY_BYTES)
        if key in entries:
            raise cursor.error(f"key '{key}' stands twice", start)
        entries[key] = _value(cursor, key)
    alignment = _alignment(cursor, entries.get(ALIGNMENT_KEY))
    described = [_describe(cursor, i) for i in range(n_tensors)]
    data_offset = -(-cursor.at // alignment) * alignment
    return Header(version, alignment, entries, _place(cursor, described, data_offset, alignment), data_offset)


def _version(cursor: _Cursor) -> int:
    head = bytes(cursor.view[:32])
    if not head.startswith(MAGIC):
        for start, hint in FOREIGN:
            if head.startswith(start):
                raise cursor.error(f"not a GGUF file: this is {hint}")
        if head[8:9] == b"{":
            raise cursor.error("not a GGUF file: this looks like safetensors; convert it to GGUF")
        raise cursor.error(f"not a GGUF file: it starts with {head[:4]!r}, expected {MAGIC!r}")
    cursor.claim(4, "the magic")
    version = cursor.u32("the version")
    if version in VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if 0 < swapped < 1 << 16 and version > swapped:
        raise cursor.error(f"a big-endian GGUF file (version {swapped}); only little-endian files are read: convert it again", 4)
    if version > max(VERSIONS):
        raise cursor.error(f"GGUF version {version} is newer than {max(VERSIONS)}, the newest this library reads: update the library", 4)
    raise cursor.error(f"GGUF version {version} is no longer read, only {VERSIONS[0]} and {VERSIONS[1]}: convert the model again", 4)


def _value(cursor: _Cursor, key: str) -> Entry:
    tid = cursor.u32(f"the type of key '{key}'")
    if tid == ARRAY:
        return _array(cursor, key)
    if tid == STRING:
        start = cursor.at
        cursor.claim(cursor.u64(f"the length of key '{key}'"), f"key '{key}'")
        return Entry(tid, -1, start, cursor.at)
    if tid not in SCALAR_BYTES:
        raise cursor.error(f"key '{key}' has value type {tid}, expected 0 to 12", cursor.at - 4)
    start = cursor.claim(SCALAR_BYTES[tid], f"key '{key}'")
    _check_bools(cursor, key, tid, start)
    return Entry(tid, -1, start, cursor.at)


def _array(cursor: _Cursor, key: str) -> Entry:
    tid = cursor.u32(f"the element type of key '{key}'")
    if tid == ARRAY:
        raise cursor.error(f"key '{key}' is an array of arrays, which no model uses", cursor.at - 4)
    if tid == STRING:
        count = cursor.count(f"strings of key '{key}'", 8, MAX_STRINGS)
        start = cursor.at
        _skip_strings(cursor, key, count)
        return Entry(tid, count, start, cursor.at)
    if tid not in SCALAR_BYTES:
        raise cursor.error(f"key '{key}' is an array of type {tid}, expected 0 to 12", cursor.at - 4)
    count = cursor.count(f"elements of key '{key}'", SCALAR_BYTES[tid], MAX_INT64)
    start = cursor.claim(count * SCALAR_BYTES[tid], f"key '{key}'")
    _check_bools(cursor, key, tid, start)
    return Entry(tid, count, start, cursor.at)


def _skip_strings(cursor: _Cursor, key: str, count: int) -> None:
    """The hot loop of opening: 0.2 us a string, so plain Python serves. An overlong string is caught by the next step or at the end."""
    view, at, last = cursor.view, cursor.at, cursor.end - 8
    length_at = LENGTH.unpack_from
    for i in range(count):
        if at > last:
            raise cursor.error(f"key '{key}': string {i} of {count} starts after the end of the file, at byte {at}")
        at += 8 + length_at(view, at)[0]
    if at > cursor.end:
        raise cursor.error(f"key '{key}': string {count - 1} of {count} ends after the end of the file, at byte {at}")
    cursor.at = at


def _check_bools(cursor: _Cursor, key: str, tid: int, start: int) -> None:
    if tid != BOOL or cursor.at == start:
        return
    raw = np.frombuffer(cursor.view[start : cursor.at], np.uint8)
    if raw.max() > 1:
        i = int(np.argmax(raw > 1))
        raise cursor.error(f"key '{key}': a bool is {raw[i]}, expected 0 or 1", start + i)


def _alignment(cursor: _Cursor, entry: Entry | None) -> int:
    if entry is None:
        return DEFAULT_ALIGNMENT
    if entry.tid != UINT32 or entry.count >= 0:
        raise cursor.error(f"key '{ALIGNMENT_KEY}' is {entry.kind}, expected u32", entry.start)
    value = U32.unpack_from(cursor.view, entry.start)[0]
    if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.error(f"key '{ALIGNMENT_KEY}' is {value}, expected a power of two up to {MAX_ALIGNMENT}", entry.start)
    return value


def _describe(cursor: _Cursor, i: int) -> RawTensor:
    """One tensor's row of the table; its offset is still relative to the data."""
    start = cursor.at
    name = cursor.text(f"the name of tensor {i}", MAX_NAME_BYTES)
    n_dims = cursor.u32(f"tensor '{name}': the number of dimensions")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"tensor '{name}' has {n_dims} dimensions, expected 1 to {MAX_DIMS}", cursor.at - 4)
    dims_at = cursor.claim(8 * n_dims, f"tensor '{name}': the dimensions")
    dims = struct.unpack_from(f"<{n_dims}Q", cursor.view, dims_at)
    values = 1
    for dim in dims:
        values *= dim
        if not 1 <= dim <= MAX_INT64 or values > MAX_INT64:
            raise cursor.error(
                f"tensor '{name}' has dimensions {dims}, expected each at least 1 and their product at most 2^63 - 1", dims_at
            )
    tid = cursor.u32(f"tensor '{name}': the type")
    try:
        encoding = by_id(tid)
    except ModelLoadError as error:
        raise cursor.error(f"tensor '{name}': {error}", cursor.at - 4) from error
    if dims[0] % encoding.block_values:
        raise cursor.error(
            f"tensor '{name}' has rows of {dims[0]} values, which do not fill {encoding.name} blocks of {encoding.block_values}", dims_at
        )
    n_bytes = values // encoding.block_values * encoding.block_bytes
    return RawTensor(name, dims[::-1], encoding, n_bytes, cursor.u64(f"tensor '{name}': the offset"), start)


def _place(cursor: _Cursor, described: list[RawTensor], data_offset: int, alignment: int) -> list[RawTensor]:
    """Check names and offsets against each other and the file, and make the offsets absolute."""
    placed: list[RawTensor] = []
    seen: set[str] = set()
    running = 0
    for tensor in described:
        if tensor.name in seen:
            raise cursor.error(f"tensor '{tensor.name}' stands twice", tensor.described_at)
        seen.add(tensor.name)
        if tensor.offset != running:
            raise cursor.error(
                f"tensor '{tensor.name}' has offset {tensor.offset}, expected {running} (the end of the one before, "
                f"aligned to {alignment})",
                tensor.described_at,
            )
        start = data_offset + running
        if start + tensor.n_bytes > cursor.end:
            raise cursor.error(
                f"tensor '{tensor.name}' ends at byte {start + tensor.n_bytes}, past the end of the file; the file may be truncated",
                tensor.described_at,
            )
        running += -(-tensor.n_bytes // alignment) * alignment
        placed.append(RawTensor(tensor.name, tensor.shape, tensor.encoding, tensor.n_bytes, start, tensor.described_at))
    return placed
