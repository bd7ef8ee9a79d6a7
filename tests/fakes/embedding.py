"""A fake model that embeds: a text's vector is a function of its tokens, read back from the KV blocks like FakeRunner's logits."""

from __future__ import annotations

import zlib

import numpy as np

from fakes import FakeRunner
from vllm_cpp.scheduler import Chunk

DIM = 6


def vector(token_ids: list[int]) -> np.ndarray:
    values = np.random.default_rng(zlib.crc32(np.array(token_ids, np.int64).tobytes())).standard_normal(DIM).astype(np.float32)
    return values / np.linalg.norm(values)


class FakeEmbedder(FakeRunner):
    """`whole_texts`: every chunk must be a text from its first token to its last."""

    has_state = True
    embeds = True

    def __init__(self, *, whole_texts: bool = False, **sizes: int) -> None:
        super().__init__(**sizes)
        self.whole_texts = whole_texts

    def run(self, chunks: list[Chunk]) -> np.ndarray:
        if self.whole_texts:
            assert all(chunk.start == 0 and chunk.sample for chunk in chunks)
        super().run(chunks)
        return np.array([vector(self._context(chunk)) for chunk in chunks if chunk.sample], np.float32).reshape(-1, DIM)
