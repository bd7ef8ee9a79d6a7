"""Every pre-tokenizer family cuts where llama.cpp does, or where the model's own pattern does."""

from __future__ import annotations

from pathlib import Path

import pytest
import regex

from vllm_cpp.tokenizer import Tokenizer
from vllm_cpp.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from vocabularies import byte_letters, byte_pair_keys, byte_pairs, families, family_texts, file

_LETTERS = byte_letters()
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NOT_HAN_UPPER, _NOT_HAN_LOWER = r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]", r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# The patterns of the models' own tokenizers, run by another engine.
OWN = {
    "gpt-4o": rf"{_LEAD}{_UPPER}*{_LOWER}+{_SHORT}|{_LEAD}{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}",
    "tekken": rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}",
    "kimi-k2": (
        rf"[\p{{Han}}]+|{_LEAD}{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+{_SHORT}|{_LEAD}{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*{_SHORT}"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_END}"
    ),
}


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory):
    merges = [f"{_LETTERS[a]} {_LETTERS[b]}" for a, b in byte_pairs()]
    folder: Path = tmp_path_factory.mktemp("families")

    def make(pre: str) -> Tokenizer:
        return Tokenizer.from_gguf(file(folder / f"{pre}.gguf", **byte_pair_keys(merges, pre=pre)))

    return make


def test_every_family_is_recorded():
    assert {PRE_TOKENIZERS[name] for name in families()} == set(PRE_TOKENIZERS.values())


@pytest.mark.parametrize("pre", families())
def test_cuts_where_llama_cpp_does(tokenizer_of, pre: str):
    tokenizer = tokenizer_of(pre)
    for text, expected in zip(family_texts(), families()[pre], strict=True):
        if expected is not None:
            assert tokenizer.encode(text) == expected, text


def naive_ids(pattern: str, text: str) -> list[int]:
    """Words by another engine, pairs of bytes joined in the order of their rank by the obvious loop."""
    ranks = {pair: rank for rank, pair in enumerate(byte_pairs())}
    ids: list[int] = []
    for word in regex.findall(f"(?V1){pattern}", text):
        parts = [bytes((byte,)) for byte in word.encode()]
        while True:
            pairs = [(ranks[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in ranks]
            if not pairs:
                break
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [256 + ranks[part] if len(part) == 2 else part[0] for part in parts]
    return ids


@pytest.mark.parametrize("pre", OWN)
def test_cuts_where_the_models_own_pattern_does(tokenizer_of, pre: str):
    tokenizer = tokenizer_of(pre)
    for text in family_texts():
        assert tokenizer.encode(text) == naive_ids(OWN[pre], text), text


def test_departures_from_llama_cpp_are_only_the_known_ones():
    assert {pre for pre, ids in families().items() if None in ids} == {"gpt-4o", "tekken", "kimi-k2", "youtu", "tiny_aya", "superbpe"}
