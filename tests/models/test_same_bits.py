"""The same bits for a sequence's logits, whatever happens around it: threads, cuts of the prompt, KV blocks, company in the step, what a
stranger left in its place. For every family."""

from __future__ import annotations

import numpy as np
import pytest

import oracle
from models.driving import BLOCK, NUM_BLOCKS, blocks_for, logits_along, runner
from vllm_cpp import models
from vllm_cpp.config import offload
from vllm_cpp.scheduler.batch import Chunk

STEPS = 4


def tokens_of(name: str) -> tuple[list[int], list[int]]:
    recording = oracle.load(name)
    return recording["prompt"].tolist(), recording["generated"].tolist()[:STEPS]


@pytest.mark.parametrize("name", oracle.one_case_a_size())
def test_logits_are_the_same_bits_however_the_work_is_cut(name: str, tiny_model) -> None:
    prompt, generated = tokens_of(name)
    n = len(prompt)
    with runner(tiny_model(name), threads=1, kv_cache_dtype="f16") as loaded:
        alone = logits_along(loaded, prompt, generated)
        assert np.isfinite(alone).all()
        # The place has a stranger's state now, and the blocks hold other keys.
        assert np.array_equal(logits_along(loaded, prompt, generated, [2, 9, n - 1], seed=1), alone)
    with runner(tiny_model(name), threads=3, kv_cache_dtype="f16") as loaded:
        assert np.array_equal(logits_along(loaded, prompt, generated, seed=2, state_id=7), alone)
        assert np.array_equal(logits_along(loaded, prompt, generated, range(1, n), seed=3, state_id=7), alone)
        assert np.array_equal(in_company(loaded, prompt, generated), alone)


@pytest.mark.parametrize("name", oracle.one_case_a_size())
def test_copied_weights_give_the_same_bits(name: str, tiny_model) -> None:
    prompt, generated = tokens_of(name)
    with runner(tiny_model(name)) as loaded:
        borrowed = logits_along(loaded, prompt, generated)
        n_bytes = loaded._weights.borrowed_bytes + loaded._weights.copied_bytes
        assert loaded._weights.borrowed_bytes > 0
    with runner(tiny_model(name), threads=2, residency=offload.Residency(mmap=False)) as loaded:
        assert np.array_equal(logits_along(loaded, prompt, generated), borrowed)
        assert (loaded._weights.borrowed_bytes, loaded._weights.copied_bytes) == (0, n_bytes)


def in_company(loaded: models.Runner, prompt: list[int], generated: list[int]) -> np.ndarray:
    """The same rows as `logits_along`, while others of other lengths come, go on and leave in the same steps."""
    n, half = len(prompt), NUM_BLOCKS // 2
    ours, others = blocks_for(n + len(generated), 4, range(half)), list(range(half, NUM_BLOCKS))
    first, second = others[:5], others[5:10]
    cut = n // 3
    loaded.run([Chunk([9, 8, 7], 0, first, False, 3), Chunk(prompt[:cut], 0, ours, False, 2), Chunk(prompt, 0, second, True, 0)])
    rows = [
        loaded.run([Chunk(prompt[cut:], cut, ours, True, 2), Chunk([6], 3, first, True, 3), Chunk([5, 4], n, second, True, 0)])[0].copy()
    ]
    for i, token in enumerate(generated[:-1]):
        company = [Chunk([1 + i], 4 + i, first, True, 3), Chunk(prompt[: 2 * i + 1], 0, others[10:11], i == 1, 5)]
        step = [*company[: i % 3], Chunk([token], n + i, ours, True, 2), *company[i % 3 :]]
        at = [chunk.block_ids for chunk in step if chunk.sample].index(ours)
        rows.append(loaded.run(step)[at].copy())
    return np.stack(rows)


@pytest.mark.parametrize("name", ["qwen3-s1-z1-F32", "llama_moe-s6-z0-mix"])
def test_a_q8_0_cache_gives_the_same_bits_too(name: str, tiny_model) -> None:
    prompt, generated = tokens_of(name)
    with runner(tiny_model(name), threads=1, kv_cache_dtype="q8_0") as loaded:
        alone = logits_along(loaded, prompt, generated)
    with runner(tiny_model(name), threads=3, kv_cache_dtype="q8_0") as loaded:
        assert np.array_equal(logits_along(loaded, prompt, generated, [1, 2, 9, 20], seed=1), alone)
        assert np.array_equal(in_company(loaded, prompt, generated), alone)


@pytest.mark.parametrize("family", oracle.families())
def test_a_step_longer_than_one_piece(family: str, tiny_model) -> None:
    """A prompt of more tokens than fit a piece, sampled in the middle of the step, gives what separate runs of other lengths give."""
    rng = np.random.default_rng(0)
    long, short = rng.integers(0, 300, models.PIECE_TOKENS - 37).tolist(), rng.integers(0, 300, 90).tolist()
    with runner(tiny_model(oracle.case_of(family)), threads=2, kv_cache_dtype="f16") as loaded:
        blocks = blocks_for(BLOCK * NUM_BLOCKS)
        first, second = blocks[:15], blocks[15:18]
        together = loaded.run([Chunk(long, 0, first, True, 0), Chunk(short, 0, second, True, 1)]).copy()
        assert np.isfinite(together).all()
        assert np.array_equal(loaded.run([Chunk(short, 0, second, True, 2)])[0], together[1])
        for start, end in ((0, 131), (131, 389), (389, len(long))):
            rows = loaded.run([Chunk(long[start:end], start, first, True, 3)])
        assert np.array_equal(rows[0], together[0])
