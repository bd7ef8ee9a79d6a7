"""Byte-pair encoding over characters (Gemma 4): spaces are written as in SentencePiece vocabularies, nothing is cut at words, and a
character that is no token becomes its bytes' tokens.

Owns the `tokenizers` pipeline for it, and the runs of line ends, which are one token where the vocabulary has one of that length. Must not
know special tokens. The pipeline runs outside the interpreter lock; it is safe to call from several threads.
"""

from __future__ import annotations

import re

import tokenizers

from vllm_cpp.tokenizer.byte_pair import merging_model
from vllm_cpp.tokenizer.sentence_piece import SPACE
from vllm_cpp.tokenizer.vocabulary import Vocabulary

_LINES = re.compile(r"[^\n]+|\n+")


class CharacterPairEncoder:
    """Text without special tokens to ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._pipeline = tokenizers.Tokenizer(merging_model(vocabulary, vocabulary.ids, byte_fallback=True))

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        for part in _LINES.findall(text.replace(" ", SPACE)):
            whole = self._ids.get(part) if part[0] == "\n" else None
            out += [whole] if whole is not None else self._pipeline.encode(part, add_special_tokens=False).ids
        return out
