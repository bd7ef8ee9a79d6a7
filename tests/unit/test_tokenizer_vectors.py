"""Every recorded vocabulary gives the recorded ids, and its own text back."""

from __future__ import annotations

import pytest

from vocabularies import NAMES, Vocabularies, recorded, texts

# What llama.cpp takes for an end of generation, with each vocabulary.
ENDS = {
    "command-r": {0, 255001},
    "deepseek-coder": {32014},
    "deepseek-llm": {100001},
    "falcon": {11},
    "gemma-4": {1, 7, 10},
    "gpt-2": {50256},
    "llama-bpe": {128001, 128009},
    "llama-spm": {2},
    "mpt": {0},
    "phi-3": {2, 32000, 32007},
    "qwen2": {128247, 151643, 151645},
    "refact": {0, 4, 18},
    "starcoder": {0, 4},
}


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_pairs(vocabularies: Vocabularies, name: str):
    tokenizer = vocabularies.tokenizer(name)
    inputs = texts("texts")
    assert [tokenizer.encode(text) for text in inputs] == recorded(name)
    assert [tokenizer.decode(ids) for ids in recorded(name)] == inputs


def test_qwen35_pairs(vocabularies: Vocabularies):
    tokenizer = vocabularies.tokenizer("qwen2", "qwen35")
    inputs = texts("texts-qwen35")
    assert [tokenizer.encode(text) for text in inputs] == recorded("qwen35")
    assert [tokenizer.decode(ids) for ids in recorded("qwen35")] == inputs


@pytest.mark.parametrize("name", NAMES)
def test_our_texts_with_and_without_special_tokens(vocabularies: Vocabularies, name: str):
    tokenizer = vocabularies.tokenizer(name)
    got = [tokenizer.encode(text, add_special=special, parse_special=special) for text in texts("texts-more") for special in (False, True)]
    assert got == recorded(f"{name}-more")


@pytest.mark.parametrize("name", NAMES)
def test_ends_of_generation(vocabularies: Vocabularies, name: str):
    tokenizer = vocabularies.tokenizer(name)
    assert tokenizer.eos_ids == ENDS[name]
    assert tokenizer.eos_id in tokenizer.eos_ids
