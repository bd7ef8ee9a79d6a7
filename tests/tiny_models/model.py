"""One tiny model under construction: keys, a vocabulary, tensors of random weights.

Owns how values are drawn and which encoding a tensor gets. Must not know families. A tensor's values come from a stream of its own,
seeded with (seed, crc32 of the name), so that adding a tensor leaves all others as they were. Shapes are (rows, cols) = (outputs,
inputs); in the file the columns come first.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from vllm_cpp.quants import ENCODINGS

from .blocks import random_blocks
from .container import Stored, as_bytes, file_bytes, value, write_shards
from .vocabulary import CHAT_TEMPLATE, vocabulary

VOCAB = 320
MIX = "mix"
# general.file_type of a file that is mostly of one encoding; informative only
FILE_TYPE = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18,
    "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26, "IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32,
    "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, "NVFP4": 39, MIX: 15,
}  # fmt: skip


def checksum(name: str) -> int:
    return zlib.crc32(name.encode())


def mixed(name: str) -> tuple[str, ...]:
    """What "mix" prefers for a tensor, best first; the first whose blocks fill a row is taken."""
    odd = checksum(name) % 2
    if "_exps" in name:
        return ("Q6_K" if "down" in name and not odd else "Q4_K", "Q5_0", "F16")
    if "token_embd" in name:
        return ("Q8_0", "F16")
    if name.startswith("output"):
        return ("Q6_K", "Q8_0", "F16")
    if "attn" in name:
        return ("Q6_K" if "_v" in name and odd else "Q5_K", "Q8_0", "F16")
    any_of = ("Q4_0", "Q5_1", "Q8_0", "IQ4_XS", "Q3_K", "Q4_1", "IQ4_NL", "Q2_K")
    return (any_of[checksum(name) % 8], "Q8_0", "BF16")


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> the upper half of its bits, rounded to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


class TinyModel:
    """Collects keys and tensors in the order they will stand in the file."""

    def __init__(self, arch: str, seed: int, dtype: str) -> None:
        if dtype != MIX and dtype not in ENCODINGS:
            raise ValueError(f"dtype {dtype!r}: expected {MIX} or an encoding's name")
        self.arch, self.seed, self.dtype = arch, seed, dtype
        self.kvs: dict[str, bytes] = {}
        self.tensors: dict[str, Stored] = {}
        self.key("general.architecture", arch)
        self.key("general.type", "model")
        self.key("general.name", f"tiny {arch} {seed} {dtype}")
        self.key("general.quantization_version", 2)
        self.key("general.file_type", FILE_TYPE.get(dtype, 0))

    # -- keys
    def key(self, name: str, v: Any, kind: str | None = None) -> None:
        self.kvs[name] = value(v, kind)

    def keys(self, pairs: dict[str, Any]) -> None:
        """Keys under the architecture's prefix; None leaves one out."""
        for name, v in pairs.items():
            if v is not None:
                self.key(f"{self.arch}.{name}", v)

    def vocabulary(self, pre: str) -> None:
        tokens, kinds, merges = vocabulary(VOCAB)
        self.key("tokenizer.ggml.model", "gpt2")
        self.key("tokenizer.ggml.pre", pre)
        self.key("tokenizer.ggml.tokens", tokens)
        self.key("tokenizer.ggml.token_type", kinds)
        self.key("tokenizer.ggml.merges", merges)
        self.key("tokenizer.ggml.eos_token_id", tokens.index("<|im_end|>"))
        self.key("tokenizer.ggml.bos_token_id", tokens.index("<|endoftext|>"))
        self.key("tokenizer.ggml.padding_token_id", tokens.index("<|endoftext|>"))
        self.key("tokenizer.ggml.add_bos_token", False)
        self.key("tokenizer.chat_template", CHAT_TEMPLATE)

    # -- tensors
    def encoding_for(self, name: str, cols: int) -> str:
        wanted = mixed(name) if self.dtype == MIX else (self.dtype, "F16")
        return next(e for e in wanted if cols % ENCODINGS[e].block_values == 0)

    def weights(self, name: str, shape: tuple[int, ...], std: float, encoding: str | None = None) -> None:
        """Random weights with that standard deviation, in the model's own encoding unless one is named."""
        encoding = encoding or self.encoding_for(name, shape[-1])
        rng = self._rng(name)
        if ENCODINGS[encoding].block_values > 1:
            blocks = math.prod(shape) // ENCODINGS[encoding].block_values
            self._put(name, shape, encoding, random_blocks(encoding, blocks, std, rng))
            return
        x = rng.standard_normal(shape, np.float32) * np.float32(std)
        self._put(name, shape, encoding, bf16_bits(x) if encoding == "BF16" else x.astype({"F32": "<f4", "F16": "<f2"}[encoding]))

    def matrix(self, name: str, *shape: int, gain: float = 1.0, encoding: str | None = None) -> None:
        """A weight (rows, cols), or a tower (experts, rows, cols), that keeps a unit input near `gain`."""
        self.weights(name, shape, gain / shape[-1] ** 0.5, encoding)

    def vector(self, name: str, *shape: int, mean: float = 0.0, std: float = 0.1) -> None:
        """Floats around a mean: norms around 1, biases around 0."""
        self.floats(name, mean + std * self._rng(name).standard_normal(shape))

    def uniform(self, name: str, *shape: int, low: float, high: float) -> None:
        """Floats between two bounds: decays, time steps."""
        self.floats(name, self._rng(name).uniform(low, high, shape))

    def choices(self, name: str, rows: int, of: int, n: int) -> None:
        """Rows of n different integers below `of` (I32)."""
        picked = self._rng(name).random((rows, of)).argsort(1)[:, :n]
        self._put(name, picked.shape, "I32", picked.astype("<i4"))

    def floats(self, name: str, array: np.ndarray) -> None:
        self._put(name, array.shape, "F32", array.astype("<f4"))

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, checksum(name)])

    def _put(self, name: str, shape: tuple[int, ...], encoding: str, data: np.ndarray) -> None:
        if name in self.tensors:
            raise ValueError(f"tensor {name} written twice")
        self.tensors[name] = Stored(tuple(reversed(shape)), ENCODINGS[encoding].ggml_id, as_bytes(data))

    # -- the file
    def write(self, path: Path) -> Path:
        path.write_bytes(file_bytes(self.kvs, self.tensors))
        return path

    def write_split(self, path: Path, shards: int, *, first_empty: bool = False) -> list[Path]:
        """`shards` files named after `path`; returns them in order."""
        return write_shards(path, shards, self.kvs, self.tensors, first_empty=first_empty)


class Outline(TinyModel):
    """Keys, and names and shapes of tensors, without the time that weights take."""

    def weights(self, name: str, shape: tuple[int, ...], std: float, encoding: str | None = None) -> None:
        self.tensors[name] = Stored(tuple(reversed(shape)), ENCODINGS["F32"].ggml_id, b"")
