"""WordPiece encoding: text is made plain, cut into words, and each word into the longest pieces the vocabulary has, from its front.

Owns what BERT's vocabularies expect of a text: lower case and bare letters, control characters dropped, every punctuation mark and Chinese
character a word of its own. Must not know special tokens. The rules are llama.cpp's, which departs from BERT's own in two places: of a
character that falls apart into several letters (a Hangul syllable) only the first is kept, and every combining mark is dropped, those that
take room of their own (Indic vowel signs) too. Embeddings are compared with stored ones, so what others computed counts here.
"""

from __future__ import annotations

import unicodedata

from vllm_cpp.tokenizer.vocabulary import Vocabulary

_START = "▁"  # U+2581: how this form of the vocabulary marks the front of a word
_REMEMBERED_WORDS = 1 << 16

_SPACES = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(code) for code in range(0x2000, 0x200B)}
# Chinese characters as BERT counts them; Hiragana, Katakana and Hangul are letters.
_CHINESE = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class _Plain(dict[int, str]):
    """For `str.translate`: what a character becomes, worked out at first use. A space ends a word."""

    def __init__(self, lowercase: bool, strip_accents: bool) -> None:
        super().__init__()
        self._lowercase = lowercase
        self._strip_accents = strip_accents

    def __missing__(self, code: int) -> str:
        plain = self[code] = self._work_out(chr(code))
        return plain

    def _work_out(self, char: str) -> str:
        if self._strip_accents:
            char = unicodedata.normalize("NFD", char)[0]
        category = unicodedata.category(char)
        if char in _SPACES:
            return " "
        if char in "\0\ufffd" or (category[0] == "C" and category != "Cn") or (self._strip_accents and category[0] == "M"):
            return ""
        plain = char.lower()[0] if self._lowercase else char
        code = ord(char)
        alone = category[0] == "P" or (code < 0x7F and category[0] == "S") or any(first <= code <= last for first, last in _CHINESE)
        return f" {plain} " if alone else plain


class WordPieceEncoder:
    """Text without special tokens to ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._unknown = [vocabulary.unk_id]
        self._longest = max(map(len, vocabulary.tokens))
        self._plain = _Plain(vocabulary.lowercase, vocabulary.strip_accents)
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        known = self._known
        for word in text.translate(self._plain).split(" "):
            if not word:
                continue
            ids = known.get(word)
            if ids is None:
                ids = self._encode_word(word)
                if len(known) >= _REMEMBERED_WORDS:
                    known.clear()
                known[word] = ids
            out += ids
        return out

    def _encode_word(self, word: str) -> list[int]:
        """The longest token at each place; a word with a place where none fits is unknown as a whole."""
        word = _START + word
        out: list[int] = []
        first, length = 0, len(word)
        while first < length:
            for last in range(min(length, first + self._longest), first, -1):
                token_id = self._ids.get(word[first:last])
                if token_id is not None:
                    out.append(token_id)
                    first = last
                    break
            else:
                return self._unknown
        return out
