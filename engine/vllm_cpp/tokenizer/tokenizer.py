"""Text to ids and back, as the file's own vocabulary says.

Owns the order of things: special tokens are cut out first, the rest goes to the encoder of the vocabulary's kind, and begin and end tokens
are put around it on request. Must not know models or requests. A tokenizer keeps nothing of the file open, and any thread may use it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cached_property

from vllm_cpp.config import fields
from vllm_cpp.errors import InvalidArgumentError
from vllm_cpp.gguf_file import GGUFModel, open_model
from vllm_cpp.tokenizer.byte_pair import BytePairEncoder
from vllm_cpp.tokenizer.character_pair import CharacterPairEncoder
from vllm_cpp.tokenizer.config_file import TokenizerConfig
from vllm_cpp.tokenizer.decoding import IncrementalDecoder, TokenBytes
from vllm_cpp.tokenizer.sentence_piece import SentencePieceEncoder
from vllm_cpp.tokenizer.special_tokens import SpecialTokens
from vllm_cpp.tokenizer.unigram import UnigramEncoder
from vllm_cpp.tokenizer.vocabulary import BYTE_PAIR, CHARACTER_PAIR, SENTENCE_PIECE, WORD_PIECE, Vocabulary, read_vocabulary
from vllm_cpp.tokenizer.word_piece import WordPieceEncoder

_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """Made with `Tokenizer.from_gguf`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._special = SpecialTokens(vocabulary)
        self._token_bytes = TokenBytes(vocabulary)
        self._encoder = _encoder(vocabulary)
        # A piece of text begins the text or follows a special token.
        self._prefix = " " if vocabulary.model == SENTENCE_PIECE and vocabulary.add_space_prefix else ""

    @classmethod
    def from_gguf(cls, source: str | os.PathLike[str] | GGUFModel, config: TokenizerConfig | None = None) -> Tokenizer:
        """The tokenizer of a GGUF file (one without tensors will do) or of an opened model. Raises ModelLoadError."""
        if config is not None and not isinstance(config, TokenizerConfig):
            raise InvalidArgumentError(f"Tokenizer.from_gguf takes a TokenizerConfig, not {fields.shown(config)}")
        if isinstance(source, GGUFModel):
            vocabulary = read_vocabulary(source)
        else:
            with open_model(fields.path_text("Tokenizer.from_gguf", source)) as model:
                vocabulary = read_vocabulary(model)
        if config is not None:
            for role, text in config.special_texts.items():
                vocabulary.rename_special(role, text, config.path)
        return cls(vocabulary)

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        return self.vocabulary.eos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a generation, `eos_id` among them."""
        return self.vocabulary.eos_ids

    @property
    def add_bos(self) -> bool:
        return self.vocabulary.add_bos

    @property
    def add_eos(self) -> bool:
        return self.vocabulary.add_eos

    @cached_property
    def longest_token_chars(self) -> int | None:
        """No token stands for more characters of a text than this. None where there is no such limit: these vocabularies merge spaces, and
        have one token for a word that they do not know."""
        if self.vocabulary.model in (BYTE_PAIR, CHARACTER_PAIR, SENTENCE_PIECE):
            return max(map(len, self.vocabulary.tokens))
        return None

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """The ids of `text`. `add_special` puts the begin and end tokens around it that the file asks for; `parse_special` reads control
        tokens that are spelled out in the text, which is for prompts made by a template and not for what a stranger wrote."""
        if not isinstance(text, str):
            raise InvalidArgumentError(f"text to encode is a {type(text).__name__}, expected a str")
        ids: list[int] = []
        if add_special and self.add_bos:
            ids.append(self.vocabulary.bos_id)
        for piece in self._special.cut(_without_surrogates(text), parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encoder.encode(self._prefix + piece)
        if add_special and self.add_eos:
            ids.append(self.vocabulary.eos_id)
        return ids

    def encode_chat(self, rendered: str) -> list[int]:
        """The ids of a prompt that a chat template made: one begin token if the file asks for it, whether or not the template wrote it."""
        ids = self.encode(rendered, parse_special=True)
        if self.add_bos and ids[:1] != [self.vocabulary.bos_id]:
            ids.insert(0, self.vocabulary.bos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True, from_start: bool = True) -> str:
        """The text of `ids`. Control tokens give no text unless `skip_special` is False. `from_start`: the ids begin a text, so that the
        space which SentencePiece vocabularies put before one is taken off again; False for ids that continue a text."""
        decoder = self.incremental(skip_special, from_start)
        return decoder.push_all(fields.items("token ids", ids)) + decoder.flush()

    def incremental(self, skip_special: bool = True, from_start: bool = False) -> IncrementalDecoder:
        """A decoder for ids that come one by one; for those of an answer by default, which continue the prompt."""
        marks_words = self.vocabulary.model == WORD_PIECE or self.vocabulary.add_space_prefix
        return IncrementalDecoder(self._token_bytes, skip_special, from_start and marks_words)


Encoder = BytePairEncoder | CharacterPairEncoder | SentencePieceEncoder | WordPieceEncoder | UnigramEncoder


def _encoder(vocabulary: Vocabulary) -> Encoder:
    if vocabulary.model == BYTE_PAIR:
        return BytePairEncoder(vocabulary)
    if vocabulary.model == CHARACTER_PAIR:
        return CharacterPairEncoder(vocabulary)
    if vocabulary.model == SENTENCE_PIECE:
        return SentencePieceEncoder(vocabulary)
    if vocabulary.model == WORD_PIECE:
        return WordPieceEncoder(vocabulary)
    return UnigramEncoder(vocabulary)


def _without_surrogates(text: str) -> str:
    """Half characters are no Unicode text, but a str can hold them: they become U+FFFD, as they would when decoded."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)
