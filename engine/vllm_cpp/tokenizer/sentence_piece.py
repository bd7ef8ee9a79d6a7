"""SentencePiece-style encoding: characters joined by score, bytes where no token fits.

Owns the joining: always the pair whose joined text has the highest score, the leftmost of equals, over a whole piece of text. Must not know
special tokens, nor the space put before a text. The order is global, but two neighbouring characters that stand side by side in no token of
the vocabulary can never be joined, nor anything across them: the text falls apart there into segments that are encoded, and remembered,
one by one.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.tokenizer.vocabulary import Vocabulary

SPACE = "▁"  # U+2581, how a space is written in token texts

_REMEMBERED_SEGMENTS = 1 << 15
_REMEMBERED_CHARS = 32  # longer segments do not come back


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.int64)


def _pairs(codes: np.ndarray) -> np.ndarray:
    return codes[:-1] << 32 | codes[1:]


def _neighbours(tokens: list[str]) -> np.ndarray:
    """Sorted keys of all character pairs inside any token."""
    ends = np.cumsum([len(token) for token in tokens])
    inside = np.ones(int(ends[-1]), bool)
    inside[ends[ends > 0] - 1] = False  # a token's last character and the next token's first are no pair
    return np.unique(_pairs(_codes("".join(tokens)))[inside[:-1]])


class SentencePieceEncoder:
    """Text without special tokens to ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._scores = vocabulary.scores.tolist()
        self._neighbours = _neighbours(vocabulary.tokens)
        self._byte_ids = [self._byte_id(vocabulary, byte) for byte in range(256)]
        self._known: dict[str, list[int]] = {}

    @staticmethod
    def _byte_id(vocabulary: Vocabulary, byte: int) -> int:
        ids = vocabulary.ids
        token_id = ids.get(f"<0x{byte:02X}>", ids.get(chr(byte)) if byte < 0x80 else None)
        token_id = vocabulary.unk_id if token_id is None else token_id
        if token_id is None:
            raise ModelLoadError(f"{vocabulary.source}: the vocabulary has neither a token for byte 0x{byte:02X} nor one for unknown text")
        return token_id

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", SPACE)
        out: list[int] = []
        known = self._known
        for segment in self._segments(text):
            ids = known.get(segment)
            if ids is None:
                ids = self._encode_segment(segment)
                if len(segment) <= _REMEMBERED_CHARS:
                    if len(known) >= _REMEMBERED_SEGMENTS:
                        known.clear()
                    known[segment] = ids
            out += ids
        return out

    def _segments(self, text: str) -> list[str]:
        pairs = _pairs(_codes(text))
        at = np.searchsorted(self._neighbours, pairs)
        joinable = np.take(self._neighbours, at, mode="clip") == pairs if self._neighbours.size else np.zeros(pairs.size, bool)
        cuts = [0, *(np.flatnonzero(~joinable) + 1).tolist(), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]

    def _encode_segment(self, segment: str) -> list[int]:
        out: list[int] = []
        for piece in self._join(segment):
            token_id = self._ids.get(piece)
            if token_id is not None:
                out.append(token_id)
            else:
                out += [self._byte_ids[byte] for byte in piece.encode()]
        return out

    def _join(self, segment: str) -> list[str]:
        """Join characters until no pair is a token. A list is the chain: a piece that was taken into its left neighbour becomes empty."""
        pieces = list(segment)
        ids, scores = self._ids, self._scores
        last = len(pieces) - 1
        following = list(range(1, last + 2))
        before = list(range(-1, last))
        queue = []
        for left in range(last):
            token_id = ids.get(pieces[left] + pieces[left + 1])
            if token_id is not None:
                queue.append((-scores[token_id], left, left + 1, 2))
        heapify(queue)
        while queue:
            _, left, right, length = heappop(queue)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != length:
                continue  # one of them was joined to something else meanwhile
            pieces[left] += pieces[right]
            pieces[right] = ""
            after = following[left] = following[right]
            if after <= last:
                before[after] = left
                token_id = ids.get(pieces[left] + pieces[after])
                if token_id is not None:
                    heappush(queue, (-scores[token_id], left, after, length + len(pieces[after])))
            earlier = before[left]
            if earlier >= 0:
                token_id = ids.get(pieces[earlier] + pieces[left])
                if token_id is not None:
                    heappush(queue, (-scores[token_id], earlier, left, length + len(pieces[earlier])))
        return [piece for piece in pieces if piece]
