"""Every family through the whole engine: the tokens that llama.cpp generated, again from a cached prefix, and in a crowd that is put back
now and then for want of KV blocks."""

from __future__ import annotations

import numpy as np
import pytest

import oracle
import vllm_cpp
from vllm_cpp.config.offload.install import reset as reset_documents

BLOCK = 16


@pytest.fixture(autouse=True)
def _a_process_of_its_own():
    reset_documents()
    yield
    reset_documents()


def answer(llm: vllm_cpp.LLM, prompt: list[int], n_tokens: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, and the logits each was chosen from."""
    rows: list[np.ndarray] = []
    completion = llm.generate(
        prompt, max_tokens=n_tokens, temperature=0, ignore_eos=True, logits_processor=lambda _, logits: rows.append(logits.copy())
    )
    return completion.token_ids, np.array(rows)


@pytest.mark.parametrize("family", oracle.families())
def test_the_recorded_tokens_first_and_again_and_in_a_crowd(family: str, tiny_model) -> None:
    name = oracle.case_of(family, dtype="F32")
    recording = oracle.load(name)
    prompt, generated = recording["prompt"].tolist(), recording["generated"].tolist()
    crowd = [prompt[:20], prompt[3:10], prompt[:20], prompt[5:6], prompt[2:19]]
    with vllm_cpp.load(tiny_model(name), threads=2, kv_cache_dtype="f32", block_size=BLOCK, num_blocks=24, max_num_seqs=4) as llm:
        tokens, rows = answer(llm, prompt, len(generated))
        assert tokens == generated
        assert np.isfinite(rows).all()
        assert llm.stats()["prefix_cache_hit_tokens"] == 0
        again, same_rows = answer(llm, prompt, len(generated))
        assert again == generated
        assert np.array_equal(same_rows, rows)
        # All blocks of the prompt but the last token's; none where a state would have to be cut back.
        hits = 0 if llm._open()._runner.has_state else (len(prompt) - 1) // BLOCK * BLOCK
        assert llm.stats()["prefix_cache_hit_tokens"] == hits
        alone = [answer(llm, one, 40)[0] for one in crowd]
    with vllm_cpp.load(
        tiny_model(name), threads=2, kv_cache_dtype="f32", block_size=BLOCK, num_blocks=6, max_num_seqs=3, enable_prefix_caching=False
    ) as llm:
        together = llm.generate(crowd, max_tokens=40, temperature=0, ignore_eos=True)
        assert [completion.token_ids for completion in together] == alone
        keeps_blocks = llm._open()._runner.num_blocks == 6
        assert (llm.stats()["preemptions"] > 0) == keeps_blocks
