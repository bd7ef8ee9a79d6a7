"""Runs a loaded model along given tokens.

Owns how a test cuts work into chunks and gives it KV blocks and state places. Must not know what the logits should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from vllm_cpp import models
from vllm_cpp.config import offload
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.gguf_file import open_model
from vllm_cpp.scheduler.batch import Chunk

BLOCK = 32
NUM_BLOCKS = 24


@contextmanager
def runner(
    path: Path, threads: int = 1, kv_cache_dtype: str = "f32", residency: offload.Residency | None = None
) -> Iterator[models.Runner]:
    params = EngineParams(
        model_path=str(path), threads=threads, block_size=BLOCK, num_blocks=NUM_BLOCKS, max_num_seqs=8, kv_cache_dtype=kv_cache_dtype
    )
    with open_model(path) as model:
        loaded = models.load(model, params, residency or offload.resolve())
        try:
            yield loaded
        finally:
            loaded.close()


def blocks_for(n_tokens: int, seed: int = 0, among: Sequence[int] = range(NUM_BLOCKS)) -> list[int]:
    """Enough KV blocks for so many tokens, in no order."""
    return [int(block) for block in np.random.default_rng(seed).permutation(among)[: -(-n_tokens // BLOCK)]]


def logits_along(
    loaded: models.Runner, prompt: list[int], generated: list[int], cuts: Iterable[int] = (), *, seed: int = 0, state_id: int = 0
) -> np.ndarray:
    """Logits after the prompt (fed in runs that end at `cuts`), then after each generated token but the last; float32 [len(generated),
    vocab]. `seed` decides the KV blocks, `state_id` the place of recurrent state."""
    blocks = blocks_for(len(prompt) + len(generated), seed)
    rows = []
    cuts = list(cuts)
    for first, last in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        out = loaded.run([Chunk(prompt[first:last], first, blocks, last == len(prompt), state_id)])
    rows.append(out[0].copy())
    for i, token in enumerate(generated[:-1]):
        rows.append(loaded.run([Chunk([token], len(prompt) + i, blocks, True, state_id)])[0].copy())
    return np.stack(rows)
