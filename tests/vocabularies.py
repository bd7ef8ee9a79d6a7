"""The recorded vocabularies, unpacked once a session, and vocabularies made for a test.

Owns where they lie and how a GGUF file with nothing but a vocabulary is written. Must not know what a tokenizer should make of it.
"""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tiny_models.container import file_bytes, string, value
from vllm_cpp.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "vectors" / "vocab"
NAMES = (
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2",
    "refact", "starcoder",
)  # fmt: skip
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type


def texts(name: str) -> list[str]:
    *found, after_the_last = (FOLDER / f"{name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    assert not after_the_last
    return found


def recorded(name: str) -> list[list[int]]:
    return [[int(word) for word in line.split()] for line in (FOLDER / f"{name}.out").read_text(encoding="ascii").splitlines()]


@cache
def families() -> dict[str, list[list[int] | None]]:
    return json.loads(lzma.decompress((FOLDER / "families.json.xz").read_bytes()))


@cache
def family_texts() -> list[str]:
    common = texts("texts")
    return [*common, *texts("texts-qwen35")[len(common) :], *texts("texts-more")]


def byte_letters() -> list[str]:
    """GPT-2's letter of each byte, worked out the way its authors did."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


@cache
def byte_pairs() -> list[bytes]:
    """The byte pairs of the family texts, in an order that favours no script."""
    encoded = [text.encode() for text in family_texts()]
    return sorted({data[i : i + 2] for data in encoded for i in range(len(data) - 1)}, key=lambda pair: (zlib.crc32(pair), pair))


def file(path: Path, **keys: Any) -> Path:
    """Write a GGUF file of these tokenizer.ggml.* keys. An int becomes a u32, a bytes stands for a value with its type in front."""
    values = {"general.architecture": value("llama")}
    for name, v in keys.items():
        key = name.replace("__", ".") if "__" in name else f"tokenizer.ggml.{name}"
        values[key] = v if isinstance(v, bytes) else value(v)
    path.write_bytes(file_bytes(values, {}))
    return path


def byte_pair_keys(merges: Sequence[str] = (), extra: Sequence[tuple[str, int]] = (), **others: Any) -> dict[str, Any]:
    """Keys of a byte-level vocabulary: the 256 bytes, what `merges` join, then the tokens of `extra` with their kinds."""
    tokens = [*byte_letters(), *("".join(merge.split(" ")) for merge in merges)]
    kinds = [NORMAL] * len(tokens) + [kind for _, kind in extra]
    tokens += [text for text, _ in extra]
    return {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "merges": value(list(merges), "str"), **others}


def sentence_piece_keys(scored: dict[str, float], extra: Sequence[tuple[str, int]] = (), **others: Any) -> dict[str, Any]:
    """Keys of a SentencePiece vocabulary: <unk> <s> </s>, the 256 bytes, the scored pieces, then `extra`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scored, *(text for text, _ in extra)]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(scored), *(kind for _, kind in extra)]
    scores = [0.0] * 259 + list(scored.values()) + [0.0] * len(extra)
    return {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, **others}


class Vocabularies:
    """Files and tokenizers by name, each made at first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizers: dict[tuple[str, str | None], Tokenizer] = {}

    def file(self, name: str, pre: str | None = None) -> Path:
        """The vocabulary's file; with another pre-tokenizer's name, if one is given."""
        path = self._folder / f"{name}-{pre}.gguf"
        if not path.exists():
            data = lzma.decompress((FOLDER / f"{name}.gguf.xz").read_bytes())
            if pre is not None:
                before, key, _ = data.rpartition(string("tokenizer.ggml.pre"))
                data = before + key + value(pre)
            path.write_bytes(data)
        return path

    def tokenizer(self, name: str, pre: str | None = None) -> Tokenizer:
        if (name, pre) not in self._tokenizers:
            self._tokenizers[name, pre] = Tokenizer.from_gguf(self.file(name, pre))
        return self._tokenizers[name, pre]
