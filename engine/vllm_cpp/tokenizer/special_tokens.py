"""Cutting special tokens out of a text before anything else looks at it.

Owns the search: longest text first over the whole input, which is llama.cpp's order and differs from left-to-right only where two special
tokens overlap. Must not know what the pieces between them become. User-defined tokens are always cut out, control tokens on request only.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

from vllm_cpp.tokenizer.vocabulary import HIDDEN, USER_DEFINED, Vocabulary

_WHITE = " \t\n\v\f\r"
# A prefix shared by all texts below; whether it is itself one of them; the longer ones.
_Node = tuple[str, bool, list["_Node"]]


def _common_prefix(a: str, b: str, length: int) -> str:
    """The prefix that both have, `length` characters of which are known to agree."""
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return a[:length]


def _prefix_tree(texts: list[str]) -> list[_Node]:
    """Prefix tree of sorted texts, so that thousands of tokens (`<unused0>` ...) cost one look where their common beginning is absent.
    Not recursive: a hostile vocabulary may nest as deep as it likes."""
    roots: list[_Node] = []
    waiting = [(texts, 0, roots)]
    while waiting:
        below, depth, siblings = waiting.pop()
        for _, group in groupby(below, key=itemgetter(depth)):
            same = list(group)
            prefix = _common_prefix(same[0], same[-1], depth)  # sorted: what the ends share, all share
            whole = same[0] == prefix
            children: list[_Node] = []
            siblings.append((prefix, whole, children))
            waiting.append((same[whole:], len(prefix), children))
    return roots


def _present(roots: list[_Node], text: str) -> list[str]:
    found: list[str] = []
    waiting = list(roots)
    while waiting:
        prefix, whole, children = waiting.pop()
        if prefix in text:
            if whole:
                found.append(prefix)
            waiting.extend(children)
    return found


class SpecialTokens:
    """The special tokens of a vocabulary, ready to be cut out."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._strip_after = vocabulary.strip_after
        special = vocabulary.having(USER_DEFINED | HIDDEN)
        always = [i for i in special if not vocabulary.kinds[i] & HIDDEN]
        self._always = _prefix_tree(self._texts(vocabulary, always))
        self._all = _prefix_tree(self._texts(vocabulary, special))

    @staticmethod
    def _texts(vocabulary: Vocabulary, ids: Iterable[int]) -> list[str]:
        return sorted({vocabulary.tokens[i] for i in ids} - {""})

    def cut(self, text: str, parse_special: bool) -> list[str | int]:
        """The text as pieces of text and token ids, in order. No piece is empty."""
        found = _present(self._all if parse_special else self._always, text)
        pieces: list[str | int] = [text] if text else []
        for special in sorted(found, key=lambda special: (-len(special.encode()), self._ids[special])):
            pieces = [part for piece in pieces for part in (self._cut_one(piece, special) if isinstance(piece, str) else (piece,))]
        return pieces

    def _cut_one(self, text: str, special: str) -> list[str | int]:
        token_id = self._ids[special]
        first, *others = text.split(special)
        parts: list[str | int] = [first] if first else []
        for other in others:
            parts.append(token_id)
            rest = other.lstrip(_WHITE) if token_id in self._strip_after else other
            if rest:
                parts.append(rest)
        return parts
