"""Ids back to text.

Owns the bytes each token stands for, and the decoder that hands out whole characters only. Must not know how ids came about. Invalid UTF-8
becomes U+FFFD, in the same places whether the ids come at once or one by one.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from vllm_cpp.config import fields
from vllm_cpp.errors import InvalidArgumentError
from vllm_cpp.tokenizer.byte_pair import BYTE_OF
from vllm_cpp.tokenizer.sentence_piece import SPACE
from vllm_cpp.tokenizer.vocabulary import BYTE, BYTE_PAIR, HIDDEN, NORMAL, USER_DEFINED, Vocabulary

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenBytes:
    """What each token stands for, worked out at first use: a vocabulary is large and an answer is short."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._shown: list[bytes | None] = [None] * len(vocabulary)

    def of(self, token_id: int, skip_special: bool) -> bytes:
        if type(token_id) is not int:
            token_id = fields.integer("a token id", token_id, 0, len(self._shown) - 1)
        if not 0 <= token_id < len(self._shown):
            raise InvalidArgumentError(f"token id {token_id} is outside the vocabulary (0 to {len(self._shown) - 1})")
        if skip_special and self._vocabulary.kinds[token_id] & HIDDEN:
            return b""
        shown = self._shown[token_id]
        if shown is None:
            shown = self._shown[token_id] = self._work_out(token_id)
        return shown

    def _work_out(self, token_id: int) -> bytes:
        kind, text = int(self._vocabulary.kinds[token_id]), self._vocabulary.tokens[token_id]
        if kind & (HIDDEN | USER_DEFINED):
            return text.encode()
        if kind & NORMAL:
            if self._vocabulary.model != BYTE_PAIR:
                return text.replace(SPACE, " ").encode()
            # A character outside the alphabet has no business in such a token; it is shown as it is.
            return b"".join(bytes((BYTE_OF[letter],)) if letter in BYTE_OF else letter.encode() for letter in text)
        if kind & BYTE:
            return bytes((int(text[3:5], 16),))
        return b""  # unused


class IncrementalDecoder:
    """Text of ids that come one by one. The pushes joined, and what flush() gives, equal decode() of all ids with the same options."""

    def __init__(self, token_bytes: TokenBytes, skip_special: bool, drop_first_space: bool) -> None:
        self._token_bytes = token_bytes
        self._skip_special = skip_special
        self._drop_first_space = drop_first_space
        self._utf8 = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this id; "" while a character is incomplete."""
        return self.push_all((token_id,))

    def push_all(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(self.take_bytes(token_ids))

    def take_bytes(self, token_ids: Iterable[int]) -> bytes:
        data = b"".join([self._token_bytes.of(i, self._skip_special) for i in token_ids])
        if data and self._drop_first_space:
            self._drop_first_space = False
            return data.removeprefix(b" ")
        return data

    def flush(self) -> str:
        """What is left of an incomplete character, as U+FFFD. The decoder can be used again afterwards."""
        return self._utf8.decode(b"", final=True)
