"""What the header walk takes and what it refuses.

The names in capitals are those of llama.cpp's handcrafted files (its tests/test-gguf.cpp), so that the two lists can be compared. Every
refusal must name the key or tensor where there is one, and the byte.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tiny_models.container import KINDS, describe, pad, start, string, value
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import GGUFModel, open_model
from vllm_cpp.quants import ENCODINGS

F32, F16, Q8_0, I64 = (ENCODINGS[name].ggml_id for name in ("F32", "F16", "Q8_0", "I64"))
BIG = (1 << 64) - 1


@dataclass
class Draft:
    """A file in pieces, each of which a test may replace. As it stands it is valid: three keys, three tensors."""

    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_kvs: int | None = None
    kvs: list[bytes] = field(
        default_factory=lambda: [
            string("general.architecture") + value("llama"),
            string("some.flag") + value(True),
            string("some.list") + value(["a", "", "é"]),
        ]
    )
    tensors: list[bytes] = field(
        default_factory=lambda: [describe("a", (4, 3), F32, 0), describe("b", (64, 2), Q8_0, 64), describe("c", (8, 3, 2), F16, 224)]
    )
    alignment: int = 32
    data: bytes = bytes(range(256)) + bytes(64)

    def bytes(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_kvs = len(self.kvs) if self.n_kvs is None else self.n_kvs
        head = self.magic + start(n_tensors, n_kvs, self.version)[4:] + b"".join(self.kvs + self.tensors)
        return pad(head, self.alignment) + self.data

    def key(self, raw: bytes) -> Draft:
        self.kvs.append(raw)
        return self

    def only(self, *tensors: bytes) -> Draft:
        self.tensors = list(tensors)
        return self


def opened(folder: Path, blob: bytes, name: str = "m.gguf") -> GGUFModel:
    (folder / name).write_bytes(blob)
    return open_model(folder / name)


def refusal(folder: Path, blob: bytes) -> str:
    with pytest.raises(ModelLoadError) as caught:
        opened(folder, blob)
    text = str(caught.value)
    assert text.startswith(f"{folder / 'm.gguf'}: ")
    return text


def test_the_draft_is_valid(tmp_path: Path) -> None:
    with opened(tmp_path, Draft().bytes()) as model:
        assert model.architecture == "llama"
        assert dict(model.kv) == {"general.architecture": "llama", "some.flag": True, "some.list": ["a", "", "é"]}
        assert [(t.name, t.shape, t.encoding.name, t.n_bytes) for t in model.tensors.values()] == [
            ("a", (3, 4), "F32", 48),
            ("b", (2, 64), "Q8_0", 136),
            ("c", (2, 3, 8), "F16", 96),
        ]


Change = Callable[[Draft], object]


def align(kind: str, v: int) -> Change:
    return lambda d: d.key(string("general.alignment") + value(v, kind))


def bad(name: str, change: Change, text: str) -> object:
    return pytest.param(change, text, id=name)


REFUSED = [
    # -- the first 24 bytes
    bad("HEADER_BAD_MAGIC", lambda d: setattr(d, "magic", b"FUGG"), r"not a GGUF file: it starts with b'FUGG'.*byte 0"),
    bad("HEADER_BAD_VERSION_0", lambda d: setattr(d, "version", 0), r"GGUF version 0 is no longer read.*byte 4"),
    bad("HEADER_BAD_VERSION_1", lambda d: setattr(d, "version", 1), r"GGUF version 1 is no longer read.*byte 4"),
    bad("HEADER_BAD_VERSION_FUTURE", lambda d: setattr(d, "version", 4), r"GGUF version 4 is newer than 3.*byte 4"),
    bad("HEADER_BIG_ENDIAN", lambda d: setattr(d, "version", 3 << 24), r"a big-endian GGUF file \(version 3\).*byte 4"),
    bad("HEADER_BAD_N_TENSORS", lambda d: setattr(d, "n_tensors", BIG), rf"{BIG} tensors .* cannot fit .*byte 8"),
    bad("HEADER_BAD_N_KV", lambda d: setattr(d, "n_kvs", BIG), rf"{BIG} key-values .* cannot fit .*byte 16"),
    bad("HEADER_N_TENSORS_TOO_MANY", lambda d: setattr(d, "n_tensors", 4), r"tensor 3"),
    bad("HEADER_N_KV_TOO_MANY", lambda d: setattr(d, "n_kvs", 4), r"the name of tensor 0"),
    # -- keys and values
    bad("KV_BAD_KEY_SIZE", lambda d: d.key(struct.pack("<Q", BIG) + value(1)), rf"key 3 has a length of {BIG} bytes"),
    bad("KV_LONG_KEY", lambda d: d.key(string("k" * 65536) + value(1)), r"key 3 has a length of 65536 bytes, expected 1 to 65535"),
    bad("KV_EMPTY_KEY", lambda d: d.key(string("") + value(1)), r"key 3 has a length of 0 bytes"),
    bad("KV_KEY_NOT_UTF8", lambda d: d.key(string(b"\xff\xfe") + value(1)), r"key 3 is not UTF-8"),
    bad("KV_BAD_TYPE", lambda d: d.key(string("k") + struct.pack("<IQ", 13, 0)), r"key 'k' has value type 13"),
    bad("KV_BAD_ARRAY_TYPE", lambda d: d.key(string("k") + struct.pack("<IIQ", 9, 13, 0)), r"key 'k' is an array of type 13"),
    bad("KV_NESTED_ARRAY", lambda d: d.key(string("k") + struct.pack("<IIQ", 9, 9, 0)), r"key 'k' is an array of arrays"),
    bad("KV_BAD_VALUE_SIZE", lambda d: d.key(string("k") + struct.pack("<IQ", 8, BIG)), rf"key 'k' needs {BIG} bytes"),
    bad("KV_BAD_ARRAY_SIZE", lambda d: d.key(string("k") + struct.pack("<IIQ", 9, 12, BIG)), rf"{BIG} elements of key 'k' .* cannot fit"),
    bad("KV_BAD_STRINGS_SIZE", lambda d: d.key(string("k") + struct.pack("<IIQ", 9, 8, BIG)), rf"{BIG} strings of key 'k' .* cannot fit"),
    bad(
        "KV_BAD_STRING_IN_ARRAY",
        lambda d: d.key(string("k") + struct.pack("<IIQQQQ", 9, 8, 3, 0, BIG, 0)),
        r"key 'k': string 2 of 3 starts after the end",
    ),
    bad("KV_BAD_LAST_STRING", lambda d: d.key(string("k") + struct.pack("<IIQQQ", 9, 8, 2, 0, 1 << 20)), r"string 1 of 2 ends after"),
    bad("KV_BAD_BOOL", lambda d: d.key(string("k") + struct.pack("<IB", 7, 2)), r"key 'k': a bool is 2"),
    bad("KV_BAD_BOOL_IN_ARRAY", lambda d: d.key(string("k") + struct.pack("<IIQ3B", 9, 7, 3, 1, 0, 255)), r"key 'k': a bool is 255"),
    bad("KV_DUPLICATE_KEY", lambda d: d.key(string("some.flag") + value(1)), r"key 'some\.flag' stands twice"),
    bad("KV_BAD_ALIGN", align("u32", 13), r"'general\.alignment' is 13, expected a power of two"),
    bad("KV_ZERO_ALIGN", align("u32", 0), r"'general\.alignment' is 0"),
    bad("KV_HUGE_ALIGN", align("u32", 1 << 31), r"'general\.alignment' is 2147483648"),
    bad("KV_WRONG_TYPE_ALIGN", align("i32", 32), r"'general\.alignment' is i32, expected u32"),
    bad("KV_ARRAY_ALIGN", lambda d: d.key(string("general.alignment") + value([32], "u32")), r"'general\.alignment' is array of u32"),
    # -- tensors
    bad("TENSORS_BAD_NAME_SIZE", lambda d: d.only(describe("n" * 64, (4,), F32, 0)), r"the name of tensor 0 has a length of 64 bytes"),
    bad("TENSORS_HUGE_NAME_SIZE", lambda d: d.only(struct.pack("<Q", BIG) + bytes(64)), rf"the name of tensor 0 has a length of {BIG}"),
    bad("TENSORS_EMPTY_NAME", lambda d: d.only(describe("", (4,), F32, 0)), r"the name of tensor 0 has a length of 0"),
    bad("TENSORS_NAME_NOT_UTF8", lambda d: d.only(describe(b"\xc3", (4,), F32, 0)), r"the name of tensor 0 is not UTF-8"),
    bad("TENSORS_BAD_N_DIMS", lambda d: d.only(describe("a", (1,) * 5, F32, 0)), r"tensor 'a' has 5 dimensions, expected 1 to 4"),
    bad("TENSORS_NO_DIMS", lambda d: d.only(describe("a", (), F32, 0) + bytes(9)), r"tensor 'a' has 0 dimensions"),
    bad("TENSORS_HUGE_N_DIMS", lambda d: d.only(string("a") + struct.pack("<I", 0xFFFFFFFF) + bytes(40)), r"has 4294967295 dimensions"),
    bad("TENSORS_BAD_SHAPE", lambda d: d.only(describe("a", (BIG, BIG), F32, 0)), r"tensor 'a' has dimensions"),
    bad("TENSORS_ZERO_DIM", lambda d: d.only(describe("a", (4, 0), F32, 0)), r"'a' has dimensions \(4, 0\), expected each at least 1"),
    bad("TENSORS_NE_TOO_BIG", lambda d: d.only(describe("a", (4 * 0x7FFFFFFF,) * 2, F32, 0)), r"tensor 'a' has dimensions"),
    bad("TENSORS_NBYTES_TOO_BIG", lambda d: d.only(describe("a", (1 << 31, 1 << 31), I64, 0)), r"tensor 'a' ends at byte .* past the end"),
    bad(
        "TENSORS_NBYTES_PAD_WRAP",
        lambda d: d.only(describe("a", (4, 1073741823, 1073741825), F32, 0)),
        r"tensor 'a' ends at byte .* past the end",
    ),
    bad("TENSORS_BAD_TYPE", lambda d: d.only(describe("a", (4,), 43, 0)), r"tensor 'a': ggml type 43 is unknown"),
    bad("TENSORS_REMOVED_TYPE", lambda d: d.only(describe("a", (32,), 4, 0)), r"tensor 'a': encoding Q4_2 \(ggml type 4\) was removed"),
    bad("TENSORS_PART_OF_A_BLOCK", lambda d: d.only(describe("a", (48, 2), Q8_0, 0)), r"tensor 'a' has rows of 48 values"),
    bad("TENSORS_BAD_OFFSET", lambda d: d.only(describe("a", (4,), F32, BIG)), rf"tensor 'a' has offset {BIG}, expected 0"),
    bad("TENSORS_GAP", lambda d: d.only(describe("a", (4,), F32, 32)), r"tensor 'a' has offset 32, expected 0"),
    bad(
        "TENSORS_OVERLAP",
        lambda d: d.only(describe("a", (4, 3), F32, 0), describe("b", (4, 3), F32, 32)),
        r"tensor 'b' has offset 32, expected 64",
    ),
    bad("TENSORS_DUPLICATE_NAME", lambda d: d.only(describe("a", (4,), F32, 0), describe("a", (4,), F32, 32)), r"tensor 'a' stands twice"),
    bad(
        "TENSORS_INCONSISTENT_ALIGN",
        lambda d: d.only(describe("a", (4,), F32, 0), describe("b", (4,), F32, 16)),
        r"tensor 'b' has offset 16, expected 32",
    ),
    # -- data
    bad("DATA_NOT_ENOUGH_DATA", lambda d: setattr(d, "data", bytes(224 + 95)), r"tensor 'c' ends at byte .* past the end of the file"),
    bad("DATA_NONE", lambda d: setattr(d, "data", b""), r"tensor 'a' ends at byte"),
    bad(
        "DATA_MEM_SIZE_OVERFLOW",
        lambda d: d.only(*(describe(n, (0x7FFFFFFFFFFFFFC0,), 24, o) for n, o in (("a", 0), ("b", 0x7FFFFFFFFFFFFFC0)))),
        r"tensor 'a' ends at byte .* past the end",
    ),
]


@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_refused(tmp_path: Path, change: Change, text: str) -> None:
    draft = Draft()
    change(draft)
    with pytest.raises(ModelLoadError, match=text) as caught:
        opened(tmp_path, draft.bytes())
    assert re.search(r"byte \d+ of \d+", str(caught.value))


def test_more_tensors_and_keys_than_any_model_has_are_refused_before_the_loop(tmp_path: Path) -> None:
    # Sparse files: the size is there, so only the bounds of the walk itself can refuse.
    limits = (((1 << 18) + 1, 0, "262145 tensors, expected at most"), (0, (1 << 16) + 1, "65537 key-values, expected at most"))
    for n_tensors, n_kvs, what in limits:
        path = tmp_path / "m.gguf"
        with path.open("wb") as f:
            f.write(start(n_tensors, n_kvs))
            f.truncate(1 << 30)
        with pytest.raises(ModelLoadError, match=what):
            open_model(path)


def test_more_strings_than_any_vocabulary_has_are_refused_before_the_loop(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as f:
        f.write(start(0, 1) + string("tokens") + struct.pack("<IIQ", 9, 8, (1 << 22) + 1))
        f.truncate(1 << 30)
    with pytest.raises(ModelLoadError, match="4194305 strings of key 'tokens', expected at most"):
        open_model(path)


# -- what is taken
def test_header_empty(tmp_path: Path) -> None:
    with opened(tmp_path, start(0, 0)) as model:
        assert not model.tensors
        assert not model.kv
        with pytest.raises(ModelLoadError, match=r"key 'general\.architecture': missing"):
            _ = model.architecture


def test_version_2(tmp_path: Path) -> None:
    with opened(tmp_path, Draft(version=2).bytes()) as model:
        assert model.version == 2
        assert len(model.tensors) == 3


@pytest.mark.parametrize("alignment", [1, 8, 64, 65536])
def test_custom_align(tmp_path: Path, alignment: int) -> None:
    sizes, offsets = (48, 136, 96), [0]
    for size in sizes:
        offsets.append(-(-(offsets[-1] + size) // alignment) * alignment)
    draft = Draft(alignment=alignment, data=bytes(range(48)) + bytes(offsets[1] - 48) + bytes(offsets[3] - offsets[1]))
    draft.key(string("general.alignment") + value(alignment, "u32"))
    shapes = (("a", (4, 3), F32), ("b", (64, 2), Q8_0), ("c", (8, 3, 2), F16))
    draft.only(*(describe(n, dims, tid, offset) for (n, dims, tid), offset in zip(shapes, offsets[:3], strict=True)))
    with opened(tmp_path, draft.bytes()) as model:
        assert model.tensors["a"].file_offset % alignment == 0
        assert model.bytes_of("a").tolist() == list(range(48))


def test_padding_after_the_last_tensor_may_be_missing(tmp_path: Path) -> None:
    """A tensor's own bytes must be there, filler need not: nothing reads it, and llama.cpp opens such files too."""
    draft = Draft().only(describe("a", (3,), F32, 0))
    draft.data = bytes(12)
    with opened(tmp_path, draft.bytes()) as model:
        assert model.tensors["a"].n_bytes == 12


def test_every_kind_of_value(tmp_path: Path) -> None:
    samples = {"f32": 0.5, "f64": 0.1, "bool": True, "str": "größe 🦙"}
    values = {kind: samples.get(kind, 7) for kind in KINDS}
    draft = Draft()
    for kind, v in values.items():
        draft.key(string(f"one.{kind}") + value(v, kind))
        draft.key(string(f"many.{kind}") + value([v, v], kind))
        draft.key(string(f"none.{kind}") + value([], kind))
    with opened(tmp_path, draft.bytes()) as model:
        for kind, v in values.items():
            assert model.kv[f"one.{kind}"] == v
            assert type(model.kv[f"one.{kind}"]) is type(v)
            assert list(model.kv[f"many.{kind}"]) == [v, v]
            assert len(model.kv[f"none.{kind}"]) == 0
            assert len(model.get_array(f"many.{kind}", kind)) == 2


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding(tmp_path: Path, encoding: str) -> None:
    row = ENCODINGS[encoding]
    draft = Draft().only(describe("w", (2 * row.block_values, 3), row.ggml_id, 0))
    draft.data = bytes(6 * row.block_bytes)
    with opened(tmp_path, draft.bytes()) as model:
        info = model.tensors["w"]
        assert (info.encoding, info.shape, info.n_bytes, info.row_bytes) == (
            row,
            (3, 2 * row.block_values),
            6 * row.block_bytes,
            2 * row.block_bytes,
        )
    draft.data = bytes(6 * row.block_bytes - 1)
    assert "tensor 'w' ends at byte" in refusal(tmp_path, draft.bytes())


# -- what is not a GGUF file at all
@pytest.mark.parametrize(
    ("blob", "text"),
    [
        (b"", r"the file is empty"),
        (b"GGU", r"it starts with b'GGU'"),
        (b"GGUF", r"the version needs 4 bytes, but 0 remain"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"git lfs pull"),
        (b"PK\x03\x04 and so on", r"a zip archive or a PyTorch checkpoint"),
        (b"<!DOCTYPE html>", r"a web page; the download may have failed"),
        (b"tjgg\x03\x00\x00\x00", r"a GGJT file from before GGUF"),
        (struct.pack("<Q", 64) + b'{"__metadata__":{}}', r"looks like safetensors"),
    ],
)
def test_other_files_are_told_by_name(tmp_path: Path, blob: bytes, text: str) -> None:
    (tmp_path / "m.gguf").write_bytes(blob)
    with pytest.raises(ModelLoadError, match=text):
        open_model(tmp_path / "m.gguf")
