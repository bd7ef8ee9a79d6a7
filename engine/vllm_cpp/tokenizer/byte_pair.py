"""Byte-level byte-pair encoding, the kind most models use.

Owns the alphabet that stands for bytes, and a `tokenizers` pipeline built in memory from a vocabulary: patterns, byte level, merges. Must
not know special tokens. The pipeline runs outside the interpreter lock; it is safe to call from several threads.
"""

from __future__ import annotations

import tokenizers
from tokenizers import models, pre_tokenizers

from vllm_cpp import log
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from vllm_cpp.tokenizer.vocabulary import Vocabulary


def _alphabet() -> list[str]:
    """GPT-2's printable character for each byte: itself where printable, else the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, next_code = [], 0x100
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(next_code))
            next_code += 1
    return letters


ALPHABET = _alphabet()
BYTE_OF = {letter: byte for byte, letter in enumerate(ALPHABET)}

# Left to itself, `tokenizers` (0.23.3) remembers the words that a tokenizer cut, up to 10,000, in memory of the thread that asked, and they
# stay as long as that thread lives, even when the tokenizer is gone. Cutting a word anew costs less than a microsecond a token.
_REMEMBERED_WORDS = 0


class BytePairEncoder:
    """Text without special tokens to ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        family = PRE_TOKENIZERS[vocabulary.pre]
        self._count = len(vocabulary)
        # Some vocabularies have no token for bytes that never occur in UTF-8. Such a byte gives no token, but it must still stand between
        # its neighbours while they are merged, so it gets an id past the end that is taken out afterwards.
        missing = [letter for letter in ALPHABET if letter not in vocabulary.ids]
        self._has_gaps = bool(missing)
        ids = {**vocabulary.ids, **{letter: self._count + i for i, letter in enumerate(missing)}} if missing else vocabulary.ids
        self._pipeline = tokenizers.Tokenizer(merging_model(vocabulary, ids, ignore_merges=family.ignore_merges))
        splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in family.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._pipeline.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])

    def encode(self, text: str) -> list[int]:
        ids = self._pipeline.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i < self._count] if self._has_gaps else ids


def merging_model(vocabulary: Vocabulary, ids: dict[str, int], **how: bool) -> models.BPE:
    """The vocabulary's merges over these ids; `how` is for `tokenizers`. A merge that can never apply is left out."""
    merges = vocabulary.merges
    if len(set(merges)) < len(merges):
        merges = list(dict.fromkeys(merges))  # the first of equal merges counts
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        return models.BPE(ids, pairs, cache_capacity=_REMEMBERED_WORDS, **how)
    except Exception:  # noqa: BLE001 (it raises plain Exception; looking for the cause beforehand would cost every good file)
        return models.BPE(ids, _usable(vocabulary, pairs, ids), cache_capacity=_REMEMBERED_WORDS, **how)


def _usable(vocabulary: Vocabulary, pairs: list[tuple[str, ...]], ids: dict[str, int]) -> list[tuple[str, ...]]:
    """The merges without those that name no tokens, which can never apply; one that is no pair at all is refused."""
    for number, pair in enumerate(pairs):
        if len(pair) != 2 or not all(pair):
            text = " ".join(pair)
            raise ModelLoadError(
                f"{vocabulary.source}: key 'tokenizer.ggml.merges': element {number} is {text!r}, expected two texts with a space between"
            )
    usable = [pair for pair in pairs if pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids]
    lost = f"{len(pairs) - len(usable)} of {len(pairs)} merges name texts that are no tokens; they are left out"
    log.once(f"merges {vocabulary.source}", f"vllm: warning: {vocabulary.source}: {lost}")
    return usable
