"""The vocabularies of embedding models: WordPiece and Unigram."""

from __future__ import annotations

import copy
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_models.container import value
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.tokenizer import Tokenizer
from vllm_cpp.tokenizer.unigram import UnigramEncoder
from vocabularies import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabularies, file, recorded, texts

WORD_PIECES = {
    "[PAD]": CONTROL, "[UNK]": UNKNOWN, "[CLS]": CONTROL, "[SEP]": CONTROL, "▁un": NORMAL, "▁una": NORMAL, "aff": NORMAL, "able": NORMAL,
    "▁the": NORMAL, "▁,": NORMAL, "▁中": NORMAL, "▁文": NORMAL, "▁e": NORMAL, "▁É": NORMAL, "▁+": NORMAL, "▁€": NORMAL,
}  # fmt: skip
IDS = {text: i for i, text in enumerate(WORD_PIECES)}
WORD_PIECE_KEYS = {
    "model": "bert", "tokens": list(WORD_PIECES), "token_type": list(WORD_PIECES.values()), "unknown_token_id": 1, "cls_token_id": 2,
    "seperator_token_id": 3, "padding_token_id": 0,
}  # fmt: skip

# <unk> <s> </s>, then scored pieces
UNIGRAMS = {"▁": -3.0, "a": -4.0, "b": -4.0, "ab": -5.0, "▁a": -6.0, "▁ab": -8.5, "aa": -8.0}


def unigram_keys(extra: list[tuple[str, int]] | None = None, **others: Any) -> dict[str, Any]:
    extra = extra or []
    return {
        "model": "t5",
        "tokens": ["<unk>", "<s>", "</s>", *UNIGRAMS, *(text for text, _ in extra)],
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * len(UNIGRAMS), *(kind for _, kind in extra)],
        "scores": [0.0, 0.0, 0.0, *UNIGRAMS.values(), *[0.0] * len(extra)],
        "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": True, "remove_extra_whitespaces": True,
        **others,
    }  # fmt: skip


def table(*replacements: tuple[str, str]) -> bytes:
    """A character map of one-byte keys: the root's children at 0x100, each with its value one entry apart."""
    units, replaced = [0] * 0x400, b""
    units[0] = 0x100 << 10
    for number, (key, text) in enumerate(replacements):
        (byte,) = key.encode()
        at = 0x100 ^ byte
        units[at] = byte | 0x100 | (at ^ (0x200 + number)) << 10
        units[0x200 + number] = len(replaced)
        replaced += text.encode() + b"\0"
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + replaced


@pytest.mark.parametrize("name", ["bert-bge", "nomic-bert-moe"])
def test_recorded_ids(vocabularies: Vocabularies, name: str) -> None:
    tokenizer = vocabularies.tokenizer(name)
    assert [tokenizer.encode(text) for text in texts("texts")] == recorded(name)
    got = [tokenizer.encode(text, add_special=special, parse_special=special) for text in texts("texts-more") for special in (False, True)]
    assert got == recorded(f"{name}-more")


# -- WordPiece
@pytest.fixture(scope="module")
def word_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_gguf(file(tmp_path_factory.mktemp("made") / "v.gguf", **WORD_PIECE_KEYS))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("unable", ["[UNK]"]),  # greedy: "una" leaves "ble", which no token begins, so the word is unknown as a whole
        ("unaaffable", ["▁una", "aff", "able"]),
        ("The THE the", ["▁the"] * 3),
        ("the,the", ["▁the", "▁,", "▁the"]),
        ("the\u0000\u200b\ufffd\x1b", ["▁the"]),
        ("the\u3000\u00a0\t\n,", ["▁the", "▁,"]),
        ("中文", ["▁中", "▁文"]),
        ("É é e\u0301", ["▁e"] * 3),
        ("+€", ["▁+", "▁€"]),  # of signs only those in ASCII stand alone
        ("€+", ["▁€", "▁+"]),
        ("€€", ["[UNK]"]),
        ("", []),
        ("  ", []),
    ],
)
def test_words_are_cut_into_the_longest_pieces_from_the_front(word_piece: Tokenizer, text: str, pieces: list[str]) -> None:
    assert word_piece.encode(text) == [IDS[piece] for piece in pieces]


def test_every_text_stands_between_cls_and_sep(word_piece: Tokenizer) -> None:
    assert word_piece.encode("the", add_special=True) == [2, IDS["▁the"], 3]
    assert word_piece.encode("", add_special=True) == [2, 3]
    assert word_piece.encode("[SEP]", parse_special=True) == [3]
    assert word_piece.encode("[SEP]") == [1, 1, 1]
    assert word_piece.decode(word_piece.encode("the , the", add_special=True)) == "the , the"


def test_long_words_and_long_texts_need_no_limit(word_piece: Tokenizer) -> None:
    assert word_piece.longest_token_chars is None
    assert word_piece.encode("x" * 100_000 + " " * 100_000 + "the") == [1, IDS["▁the"]]


def test_case_and_accents_can_be_kept(tmp_path: Path) -> None:
    keys = WORD_PIECE_KEYS | {"normalizer.lowercase": False}
    kept = Tokenizer.from_gguf(file(tmp_path / "v.gguf", **keys))
    assert kept.encode("É the The") == [IDS["▁É"], IDS["▁the"], 1]
    bare = Tokenizer.from_gguf(file(tmp_path / "v.gguf", **keys, **{"normalizer.strip_accents": True}))
    assert bare.encode("é") == [IDS["▁e"]]


def test_a_begin_token_named_as_such_comes_first(tmp_path: Path) -> None:
    assert Tokenizer.from_gguf(file(tmp_path / "v.gguf", **WORD_PIECE_KEYS, bos_token_id=0)).encode("", add_special=True) == [0, 3]


@pytest.mark.parametrize("key", ["cls_token_id", "seperator_token_id", "unknown_token_id"])
def test_a_word_piece_file_without_its_tokens_is_refused(tmp_path: Path, key: str) -> None:
    keys = {name: v for name, v in WORD_PIECE_KEYS.items() if name != key}
    with pytest.raises(ModelLoadError, match=f"'tokenizer.ggml.{key}'.* missing; a WordPiece vocabulary cannot do without it"):
        Tokenizer.from_gguf(file(tmp_path / "v.gguf", **keys))


# -- Unigram
def unigram(tmp_path: Path, extra: list[tuple[str, int]] | None = None, **others: Any) -> Tokenizer:
    return Tokenizer.from_gguf(file(tmp_path / "v.gguf", **unigram_keys(extra, **others)))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", [["▁", "ab"]]),  # -8 beats ▁ab at -8.5 and ▁a, b at -10
        ("a", [["▁a"]]),
        ("aa", [["▁a", "a"]]),
        ("aaa", [["▁a", "aa"], ["▁a", "a", "a"]]),  # the same sum: the one whose last token was found first
        ("  a   b ", [["▁a", "▁", "b"]]),
        ("", [[]]),
        ("   ", [[]]),
        ("xyz", [["▁", "<unk>"]]),  # unknown characters in a row are one token
        ("xay", [["▁", "<unk>", "a", "<unk>"]]),
    ],
)
def test_the_best_sum_of_scores_wins(tmp_path: Path, text: str, pieces: list[list[str]]) -> None:
    tokenizer = unigram(tmp_path)
    assert [tokenizer.vocabulary.tokens[i] for i in tokenizer.encode(text)] in pieces


def test_spaces_can_be_kept(tmp_path: Path) -> None:
    tokens = unigram(tmp_path, remove_extra_whitespaces=False)
    assert tokens.encode(" a ") == [tokens.vocabulary.ids[piece] for piece in ("▁", "▁a", "▁")]
    bare = unigram(tmp_path, remove_extra_whitespaces=False, add_space_prefix=False)
    assert bare.encode("a ") == [bare.vocabulary.ids[piece] for piece in ("a", "▁")]


def test_user_defined_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    tokenizer = unigram(tmp_path, [("baa", USER_DEFINED)])
    assert [tokenizer.vocabulary.tokens[i] for i in tokenizer.encode("abaab")] == ["▁a", "baa", "▁", "b"]


def test_begin_and_end_as_the_file_says(tmp_path: Path) -> None:
    assert unigram(tmp_path).encode("a", add_special=True) == [7, 2]
    assert unigram(tmp_path, add_bos_token=True).encode("a", add_special=True) == [1, 7, 2]
    assert unigram(tmp_path, add_eos_token=False).encode("a", add_special=True) == [7]


def test_characters_are_replaced_by_the_table(tmp_path: Path) -> None:
    charsmap = value(list(table(("A", "a"), ("B", "ab"), ("-", " "), ("!", ""))), "u8")
    tokenizer = unigram(tmp_path, precompiled_charsmap=charsmap)
    plain = unigram(tmp_path)
    assert tokenizer.encode("A-B!") == plain.encode("a ab")
    assert tokenizer.encode("ab€") == plain.encode("ab€")


@pytest.mark.parametrize(
    ("charsmap", "message"),
    [
        (b"\x01\x00", "its first part has 0 bytes, of 2"),
        (struct.pack("<I", 400) + bytes(100), "its first part has 400 bytes, of 104"),
        (struct.pack("<II", 4, 0x3FFFFF << 10) + b"x\0", "leads outside of itself"),
        (struct.pack("<I256I", 1024, *[0] * 0x61, 0x161 | 0x300 << 10, *[0] * 0x9E) + b"x\0", "leads outside of itself"),
        (struct.pack("<I256I", 1024, *[0] * 0x61, 0x061 | 0x300 << 10, *[0] * 0x9E) + b"x\0", "leads outside of itself"),
        (table(("a", "b")).removesuffix(b"b\0") + b"b", "names the replacement at 0, which is outside of it"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, charsmap: bytes, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        unigram(tmp_path, precompiled_charsmap=value(list(charsmap), "u8"))


def test_a_table_of_anything_is_refused_or_serves(vocabularies: Vocabularies) -> None:
    """Whatever is damaged in it, a table that passed the check leads no text outside of it."""
    vocabulary, rng, served = copy.copy(vocabularies.tokenizer("nomic-bert-moe").vocabulary), np.random.default_rng(1), 0
    whole = vocabularies.tokenizer("nomic-bert-moe").vocabulary.charsmap
    used = np.flatnonzero(np.frombuffer(whole, np.uint8, 4 * 4096, 4))
    for _ in range(40):
        damaged = bytearray(whole)
        for at in rng.choice(used, 2):
            damaged[4 + at] ^= 1 << rng.integers(0, 8)
        vocabulary.charsmap = bytes(damaged)
        try:
            encoder = UnigramEncoder(vocabulary)
        except ModelLoadError:
            continue
        served += 1
        for text in texts("texts"):
            encoder.encode(text)
    assert 0 < served < 40


def test_a_unigram_file_without_an_unknown_token_is_refused(tmp_path: Path) -> None:
    keys = unigram_keys()
    del keys["unknown_token_id"]
    keys["token_type"] = [NORMAL] * len(keys["tokens"])
    with pytest.raises(ModelLoadError, match="needs ordinary tokens and one for unknown text"):
        Tokenizer.from_gguf(file(tmp_path / "v.gguf", **keys))
