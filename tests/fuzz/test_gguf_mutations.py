"""Broken GGUF files by the hundred, opened in a child process with little memory and time.

The oracle is simple: the file is opened, or refused with a ModelLoadError that says where. No other exception, no crash, no hang, no
gigabyte. Edits aim at fields (lengths, counts, types, dimensions, offsets), because random bytes mostly hit weights.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiny_models import build
from tiny_models.container import ARRAY, KINDS, Stored, file_bytes, value
from vllm_cpp.quants import ENCODINGS

ENGINE = Path(__file__).parents[2] / "engine"
CHILD = Path(__file__).with_name("gguf_child.py")
SIZES = {tid: struct.calcsize(code) for tid, code in KINDS.values() if code}
STRING = KINDS["str"][0]
Edit = tuple[int, list[tuple[int, str]]]  # length to cut to, then (offset, bytes in hex)


def seed_file() -> bytes:
    """A small mixture-of-experts model with every kind of value, alone and in an array, and a tensor in every encoding (but two that the
    gguf package cannot read, or the whole file could not be compared)."""
    tiny = build("qwen2moe", 1, 0, "mix")
    kvs = dict(tiny.kvs)
    kvs["tokenizer.ggml.tokens"] = value(["<a>", "b", "", "çé", "Ġthe", "<0x0A>"])
    kvs["tokenizer.ggml.token_type"] = value([3, 1, 1, 1, 1, 6])
    kvs["tokenizer.ggml.scores"] = value([0.0, -1.0, -2.0, -3.0, -4.0, -5.0])
    kvs["tokenizer.ggml.merges"] = value(["Ġ t", "h e"])
    for key in ("bos", "eos", "padding"):
        kvs[f"tokenizer.ggml.{key}_token_id"] = value(0)
    for kind in KINDS:
        sample = {"str": "text", "bool": True, "f32": 1.5, "f64": -2.5}.get(kind, 3)
        kvs[f"one.{kind}"] = value(sample, kind)
        kvs[f"many.{kind}"] = value([sample, sample], kind)
    kvs["general.alignment"] = value(32, "u32")
    tensors = {name: t for name, t in tiny.tensors.items() if "blk.0" in name and "exps" not in name and len(t.data) < 2000}
    for row in (row for row in ENCODINGS.values() if row.name not in ("Q8_1", "Q2_0")):
        tensors[f"blk.0.{row.name}.weight"] = Stored((row.block_values, 2), row.ggml_id, bytes(2 * row.block_bytes))
    tensors["blk.0.tower"] = Stored((32, 2, 8), ENCODINGS["Q8_0"].ggml_id, bytes(16 * 34))
    return file_bytes(kvs, tensors)


def fields(blob: bytes) -> Iterator[tuple[int, int]]:
    """(offset, size) of every field of the header, in order: a second walk, that believes everything."""
    at = 0

    def take(size: int) -> Iterator[tuple[int, int]]:
        nonlocal at
        yield at, size
        at += size

    def number(size: int) -> int:
        return int.from_bytes(blob[at : at + size], "little")

    def text() -> Iterator[tuple[int, int]]:
        size = number(8)
        yield from take(8)
        if size:
            yield from take(size)

    yield from take(4)
    yield from take(4)
    n_tensors, n_kvs = struct.unpack_from("<QQ", blob, 8)
    yield from take(8)
    yield from take(8)
    for _ in range(n_kvs):
        yield from text()
        tid = number(4)
        yield from take(4)
        count = 1
        if tid == ARRAY:
            tid = number(4)
            yield from take(4)
            count = number(8)
            yield from take(8)
        for _ in range(count):
            yield from text() if tid == STRING else take(SIZES[tid])
    for _ in range(n_tensors):
        yield from text()
        n_dims = number(4)
        yield from take(4)
        for _ in range(n_dims):
            yield from take(8)
        yield from take(4)
        yield from take(8)


def damage(original: bytes, rng: random.Random) -> bytes:
    """Another value for a field of that size: an extreme, a neighbour, or noise."""
    size = len(original)
    n = int.from_bytes(original, "little")
    top = (1 << 8 * size) - 1
    choices = [0, 1, top, top // 2, top // 2 + 1, n + 1, n - 1, n * 2, n ^ 1 << rng.randrange(8 * size), rng.getrandbits(8 * size)]
    return (rng.choice([c for c in choices if c & top != n]) & top).to_bytes(size, "little")


def run(folder: Path, seed: bytes, edits: list[Edit]) -> list[str]:
    path = folder / "seed.gguf"
    path.write_bytes(seed)
    child = subprocess.run(
        [sys.executable, str(CHILD)],
        input=json.dumps({"seed": str(path), "edits": edits}),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ENGINE)},
    )
    verdicts = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, f"died at edit {len(verdicts)}: {edits[len(verdicts)]}\n{child.stderr[-2000:]}"
    assert len(verdicts) == len(edits)
    return verdicts


def wrong(edits: list[Edit], verdicts: list[str]) -> list[tuple[Edit, str]]:
    """Verdicts that are neither "ok" nor a refusal with a place in it."""
    place = re.compile(r"^refused .*(\(byte \d+ of \d+\)|key '.*'|tensor '.*')", re.DOTALL)
    return [(e, v) for e, v in zip(edits, verdicts, strict=True) if v != "ok" and not place.match(v)]


@pytest.fixture(scope="module")
def seed() -> bytes:
    return seed_file()


def test_the_seed_is_fine_and_walked_whole(tmp_path: Path, seed: bytes) -> None:
    assert run(tmp_path, seed, [(len(seed), [])]) == ["ok"]
    places = list(fields(seed))
    assert all(at + size == following for (at, size), (following, _) in itertools.pairwise(places))
    assert len(places) > 500


def test_one_damaged_field(tmp_path: Path, seed: bytes) -> None:
    rng = random.Random(2)
    edits: list[Edit] = [(len(seed), [(at, damage(seed[at : at + size], rng).hex())]) for at, size in fields(seed)]
    verdicts = run(tmp_path, seed, edits)
    assert wrong(edits, verdicts) == []
    # Both kinds must be common, or the edits miss.
    refused = sum(v != "ok" for v in verdicts)
    assert len(edits) // 5 < refused < len(edits) * 19 // 20


def test_several_damaged_fields(tmp_path: Path, seed: bytes) -> None:
    rng = random.Random(3)
    places = list(fields(seed))
    edits: list[Edit] = [
        (rng.choice([len(seed), rng.randrange(len(seed))]), [(at, damage(seed[at : at + n], rng).hex()) for at, n in rng.sample(places, 3)])
        for _ in range(300)
    ]
    assert wrong(edits, run(tmp_path, seed, edits)) == []


def test_every_truncation(tmp_path: Path, seed: bytes) -> None:
    """No length short of the last tensor's last byte is accepted, and each refusal says where."""
    last = max(at + size for at, size in fields(seed))
    edits: list[Edit] = [(length, []) for length in [*range(last + 64), *range(last + 64, len(seed) - 32, 997)]]
    verdicts = run(tmp_path, seed, edits)
    assert "ok" not in verdicts
    assert wrong(edits[1:], verdicts[1:]) == []
    assert "the file is empty" in verdicts[0]
