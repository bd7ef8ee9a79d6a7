"""Unigram encoding (SentencePiece's other kind): of all ways to cut a text into tokens, the one whose scores add up to the most.

Owns the normalisation that comes before, by the table in the file, and the search. Must not know special tokens. Both follow
SentencePiece: the longest entry of the table that the text begins with is replaced, then the best cut is found from left to right
(Viterbi), with a character that no token stands for costing 10 more than the worst token; such characters in a row are one unknown token.
"""

from __future__ import annotations

import struct

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.tokenizer.vocabulary import NORMAL, UNUSED, USER_DEFINED, Vocabulary

_SPACE = "▁"  # U+2581, how a space is written in token texts
_UNKNOWN_PENALTY = 10.0


class CharacterMap:
    """SentencePiece's table of replacements: a double array over bytes, and the replacements, each ended by a zero byte.

    An entry of the array holds a byte to compare (bits 0 to 7), whether a replacement ends here (bit 8), and the offset that leads on
    (bits 10 to 30, 8 bits further left where bit 9 is set); the entry a replacement ends in holds its place (bits 0 to 30).
    """

    def __init__(self, table: bytes, source: str) -> None:
        size = struct.unpack_from("<I", table)[0] if len(table) >= 4 else 0
        if size % 4 or not 0 < size < len(table) - 4:
            raise ModelLoadError(
                f"{source}: tokenizer.ggml.precompiled_charsmap says that its first part has {size} bytes, of {len(table)}; expected a "
                "multiple of 4 below that"
            )
        self._source = source
        units = np.frombuffer(table, "<u4", size // 4, 4)
        self._texts = table[4 + size :]
        self._check(units)
        self._units: list[int] = units.tolist()

    def _check(self, units: np.ndarray) -> None:
        """Walk all paths once, so that no text can lead outside the table."""
        last_text = self._texts.rfind(b"\0")
        letters = np.arange(1, 256, dtype=np.uint32)
        seen = np.zeros(len(units), bool)
        nodes = _offsets(units[:1])
        while nodes.size:
            if (nodes | 0xFF).max() >= len(units):
                raise self._broken("leads outside of itself")
            seen[nodes] = True
            children = nodes[:, None] ^ letters
            found = units[children]
            goes_on = found & 0x800000FF == letters
            found = found[goes_on]
            nodes = children[goes_on] ^ _offsets(found)
            ends = nodes[found & 0x100 != 0]
            if ends.size and ends.max() >= len(units):
                raise self._broken("leads outside of itself")
            places = units[ends] & 0x7FFFFFFF
            if places.size and places.max() > last_text:
                raise self._broken(f"names the replacement at {places.max()}, which is outside of it")
            nodes = np.unique(nodes)
            nodes = nodes[(nodes >= len(units)) | ~seen[np.minimum(nodes, len(units) - 1)]]

    def longest(self, data: bytes, at: int) -> tuple[int, int]:
        """Bytes of the longest entry that `data` goes on with at `at` (0: none), and the place of its replacement."""
        units, found, place = self._units, 0, 0
        unit = units[0]
        node = (unit >> 10) << ((unit & 0x200) >> 6)
        for index in range(at, len(data)):
            byte = data[index]
            node ^= byte
            unit = units[node]
            if byte == 0 or unit & 0x800000FF != byte:
                break
            node ^= (unit >> 10) << ((unit & 0x200) >> 6)
            if unit & 0x100:
                found, place = index + 1 - at, units[node] & 0x7FFFFFFF
        return found, place

    def replacement(self, place: int) -> bytes:
        return self._texts[place : self._texts.index(b"\0", place)]

    def _broken(self, how: str) -> ModelLoadError:
        return ModelLoadError(f"{self._source}: tokenizer.ggml.precompiled_charsmap {how}; the file is damaged")


def _offsets(units: np.ndarray) -> np.ndarray:
    """Where the children of these entries lie, before their letters are mixed in."""
    return (units >> 10) << ((units & 0x200) >> 6)


class UnigramEncoder:
    """Text without special tokens to ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        kinds, scores = vocabulary.kinds, vocabulary.scores
        normal = scores[(kinds & NORMAL) != 0]
        if not normal.size or vocabulary.unk_id is None:
            raise ModelLoadError(f"{vocabulary.source}: a Unigram vocabulary needs ordinary tokens and one for unknown text")
        self._map = CharacterMap(vocabulary.charsmap, vocabulary.source) if vocabulary.charsmap else None
        self._merge_spaces = vocabulary.merge_spaces
        self._space_first = vocabulary.add_space_prefix
        self._unknown = vocabulary.unk_id
        self._unknown_score = float(np.float32(normal.min()) - np.float32(_UNKNOWN_PENALTY))
        usable = kinds & (NORMAL | USER_DEFINED | UNUSED)
        self._tokens: dict[str, tuple[int, float]] = {}
        self._user_defined: list[str] = []
        self._longest: dict[str, int] = {}  # by first character: characters of the longest token
        for token_id in np.flatnonzero(usable).tolist():
            text = vocabulary.tokens[token_id]
            if not text:
                continue
            user_defined = bool(kinds[token_id] & USER_DEFINED)
            # A user-defined token costs nothing, so that it is taken wherever it fits.
            self._tokens[text] = token_id, 0.0 if user_defined else float(scores[token_id])
            if user_defined:
                self._user_defined.append(text)
            if len(text) > self._longest.get(text[0], 0):
                self._longest[text[0]] = len(text)
        self._user_defined.sort(key=len, reverse=True)

    def encode(self, text: str) -> list[int]:
        return self._best_cut(self._spaced(self._replaced(text)))

    def _replaced(self, text: str) -> str:
        """Every stretch the table has an entry for replaced; user-defined tokens stay as they are."""
        if self._map is None and not self._user_defined:
            return text
        data, out, at = text.encode(), [], 0
        kept = [token.encode() for token in self._user_defined if token in text]
        while at < len(data):
            whole = next((token for token in kept if data.startswith(token, at)), None)
            if whole is not None:
                out.append(whole)
                at += len(whole)
                continue
            length, place = self._map.longest(data, at) if self._map is not None else (0, 0)
            if length:
                assert self._map is not None
                out.append(self._map.replacement(place))
                at += length
                continue
            last = at + 1
            while last < len(data) and data[last] & 0xC0 == 0x80:
                last += 1
            out.append(data[at:last])
            at = last
        return b"".join(out).decode("utf-8", "replace")

    def _spaced(self, text: str) -> str:
        """Spaces as the vocabulary writes them: one before each word and no other, if they are merged; else all there are, and one before
        the first word if the file wants it."""
        if self._merge_spaces:
            return "".join(_SPACE + word for word in text.split(" ") if word)
        spaces = len(text) - len(text.lstrip(" "))
        first = _SPACE if self._space_first and spaces < len(text) else ""
        return _SPACE * spaces + first + text[spaces:].replace(" ", _SPACE)

    def _best_cut(self, text: str) -> list[int]:
        if not text:
            return []
        length, tokens, unknown = len(text), self._tokens, (self._unknown, self._unknown_score)
        best = [float("-inf")] * (length + 1)
        best[0] = 0.0
        ids, starts = [0] * (length + 1), [0] * (length + 1)
        for first in range(length):
            so_far = best[first]
            for last in range(first + 1, min(length, first + self._longest.get(text[first], 0)) + 1):
                token = tokens.get(text[first:last])
                if token is not None and so_far + token[1] > best[last]:
                    best[last], ids[last], starts[last] = so_far + token[1], token[0], first
            if text[first] not in tokens and so_far + unknown[1] > best[first + 1]:
                best[first + 1], ids[first + 1], starts[first + 1] = so_far + unknown[1], unknown[0], first
        out: list[int] = []
        last = length
        while last:
            if ids[last] != self._unknown or not out or out[-1] != self._unknown:
                out.append(ids[last])
            last = starts[last]
        return out[::-1]
