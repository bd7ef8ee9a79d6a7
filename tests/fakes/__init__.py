"""A model and a tokenizer small enough to reason about, for the rooms above the kernels.

The runner keeps real KV blocks, one token id a cell, and makes its logits from what it finds in the blocks it is given: a block that was
given away too early, filled twice or shared wrongly changes the logits, or trips a check here.
"""

from __future__ import annotations

import codecs
import threading
import zlib
from collections.abc import Callable

import numpy as np

from vllm_cpp.config.engine import EngineParams
from vllm_cpp.scheduler import Chunk

EOS = 256
BOS = 257
VOCAB_SIZE = 258
# What the fake model likes to say: letters, a space, and the bytes of "é", "€" and "😀" in any order.
LIKED = sorted(set("abc é€😀".encode()))


class FakeRunner:
    """Logits are a function of the tokens before, read back from the KV blocks."""

    is_moe = False
    has_state = False
    embeds = whole_texts = False

    def __init__(self, *, num_blocks: int = 64, block_size: int = 16, max_model_len: int = 512, eos_weight: float = 0.0) -> None:
        self.vocab_size = VOCAB_SIZE
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.eos_weight = eos_weight
        self.cells = np.full((num_blocks, block_size), -1, np.int64)
        self.batches: list[list[Chunk]] = []
        self.before_run: Callable[[list[Chunk]], None] = lambda chunks: None
        self.closed_by: threading.Thread | None = None

    def run(self, chunks: list[Chunk]) -> np.ndarray:
        self.before_run(chunks)
        self.batches.append([Chunk(list(c.token_ids), c.start, list(c.block_ids), c.sample) for c in chunks])
        written: set[tuple[int, int]] = set()
        for chunk in chunks:
            assert chunk.token_ids
            assert len(set(chunk.block_ids)) == len(chunk.block_ids)
            for position, token in enumerate(chunk.token_ids, chunk.start):
                cell = (chunk.block_ids[position // self.block_size], position % self.block_size)
                assert cell not in written, "two sequences write one cell"
                written.add(cell)
                self.cells[cell] = token
        return np.array([self.logits_after(self._context(chunk)) for chunk in chunks if chunk.sample], np.float32).reshape(-1, VOCAB_SIZE)

    def close(self) -> None:
        self.closed_by = threading.current_thread()

    def stats(self) -> dict[str, int]:
        return {"batches": len(self.batches)}

    def logits_after(self, context: list[int]) -> np.ndarray:
        return fake_logits(context, self.eos_weight)

    def _context(self, chunk: Chunk) -> list[int]:
        length = chunk.start + len(chunk.token_ids)
        used = chunk.block_ids[: -(-length // self.block_size)]
        return self.cells[used].reshape(-1)[:length].tolist()


def fake_logits(context: list[int], eos_weight: float = 0.0) -> np.ndarray:
    seed = zlib.crc32(np.array(context, np.int64).tobytes())
    logits = np.full(VOCAB_SIZE, -50.0, np.float32)
    random = np.random.default_rng(seed)
    logits[LIKED] = 2.0 * random.standard_normal(len(LIKED))
    logits[EOS] = -50.0 if eos_weight == 0.0 else 2.0 * random.standard_normal() + eos_weight
    return logits


class _Incremental:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class FakeTokenizer:
    """One token a byte, an end token and a begin token."""

    eos_ids = frozenset({EOS})
    bos_id = BOS
    longest_token_chars = 4

    def __init__(self, add_bos: bool = False) -> None:
        self.add_bos = add_bos

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        begin = [BOS] if add_special and self.add_bos else []
        return begin + list(text.encode())

    def encode_chat(self, rendered: str) -> list[int]:
        return self.encode(rendered, add_special=True, parse_special=True)

    def incremental(self) -> _Incremental:
        return _Incremental()


def decoded(token_ids: list[int]) -> str:
    """The whole text at once: what every stream must add up to."""
    return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")


def engine_params(**keywords: object) -> EngineParams:
    return EngineParams(**{"model_path": "fake.gguf", **keywords})
