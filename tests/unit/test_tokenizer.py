"""Special tokens, begin and end tokens, decoding at once and one by one."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_cpp.errors import InvalidArgumentError
from vllm_cpp.gguf_file import open_model
from vllm_cpp.tokenizer import Tokenizer
from vocabularies import BYTE, CONTROL, USER_DEFINED, Vocabularies, byte_pair_keys, file, sentence_piece_keys

# Overlapping on purpose: "lo" and "ol" fight over "olo", "ab" wins inside "abc" only if it comes first.
PIECES = {
    "▁": -1.0,
    "a": -2.0,
    "b": -2.0,
    "ab": -3.0,
    "▁a": -3.0,
    "lo": -4.0,
    "ol": -4.0,
    "o": -5.0,
    "l": -5.0,
    "lol": -4.5,
    "▁▁": -3.0,
    "é": -6.0,
}
TEXTS = st.text(st.sampled_from("ab lo▁é€\n<>\U0001f600\x00s/") | st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def byte_pair(folder: Path) -> Tokenizer:
    extra = [("<s>", CONTROL), ("</s>", CONTROL), ("<s>a", CONTROL), ("<u>", USER_DEFINED), ("  ", USER_DEFINED), ("<0xFF>", BYTE)]
    keys = byte_pair_keys(["a b", "ab a", "Ã ©"], extra, bos_token_id=259, eos_token_id=260, add_bos_token=True, add_eos_token=True)
    return Tokenizer.from_gguf(file(folder / "byte-pair.gguf", **keys))


@pytest.fixture(scope="module")
def sentence_piece(folder: Path) -> Tokenizer:
    extra = [("<u>", USER_DEFINED)]
    return Tokenizer.from_gguf(file(folder / "sentence-piece.gguf", **sentence_piece_keys(PIECES, extra)))


# -- encoding
def test_begin_and_end_tokens_only_on_request(byte_pair: Tokenizer):
    assert byte_pair.encode("ab", add_special=True) == [259, 256, 260]
    assert byte_pair.encode("ab") == [256]
    assert byte_pair.encode("") == []
    assert byte_pair.encode("", add_special=True) == [259, 260]


def test_control_tokens_only_when_parsed_and_user_defined_always(byte_pair: Tokenizer):
    assert byte_pair.encode("<s><u>", parse_special=True) == [259, 262]
    assert byte_pair.encode("<s><u>") == [*b"<s>", 262]
    assert byte_pair.encode("b  b") == [*b"b", 263, *b"b"]


def test_the_longest_special_token_wins(byte_pair: Tokenizer):
    assert byte_pair.encode("<s>ab<s>", parse_special=True) == [261, *b"b", 259]


def test_the_longest_wins_over_the_leftmost(folder: Path):
    keys = byte_pair_keys(extra=[("<a|", USER_DEFINED), ("|bcd>", USER_DEFINED)])
    tokenizer = Tokenizer.from_gguf(file(folder / "overlap.gguf", **keys))
    assert tokenizer.encode("<a|bcd>") == [*b"<a", 257]


def test_a_vocabulary_may_nest_special_tokens_as_deep_as_it_likes(folder: Path):
    keys = byte_pair_keys(extra=[("<" * n, USER_DEFINED) for n in range(1, 3000)])
    tokenizer = Tokenizer.from_gguf(file(folder / "nested.gguf", **keys))
    assert tokenizer.encode("<" * 5000) == [256 + 2998, 256 + 2000]


def test_chat_prompts_get_one_begin_token(byte_pair: Tokenizer):
    assert byte_pair.encode_chat("<s>b") == byte_pair.encode_chat("b") == [259, *b"b"]


def test_no_begin_token_unless_the_file_asks(vocabularies: Vocabularies):
    tokenizer = vocabularies.tokenizer("qwen2")
    assert not tokenizer.add_bos
    assert tokenizer.encode_chat("<|im_start|>") == [151644]


def test_phi3_swallows_white_space_after_special_tokens(vocabularies: Vocabularies):
    tokenizer = vocabularies.tokenizer("phi-3")
    with_space, without = ("<|user|> \n hi<|end|>", "<|user|>hi<|end|>")
    assert tokenizer.encode(with_space, parse_special=True) == tokenizer.encode(without, parse_special=True)
    assert tokenizer.encode("<s> hi", parse_special=True) != tokenizer.encode("<s>hi", parse_special=True)


def test_sentence_piece_puts_a_space_before_text_and_after_special_tokens(sentence_piece: Tokenizer):
    ids = sentence_piece.vocabulary.ids
    assert sentence_piece.encode("a") == [ids["▁a"]]
    assert sentence_piece.encode("a<u>a", add_special=True) == [1, ids["▁a"], ids["<u>"], ids["▁a"]]
    assert sentence_piece.encode("</s>", parse_special=True) == [2]


def test_sentence_piece_without_the_space(folder: Path):
    tokenizer = Tokenizer.from_gguf(file(folder / "no-space.gguf", **sentence_piece_keys(PIECES, add_space_prefix=False)))
    assert tokenizer.encode("a") == [tokenizer.vocabulary.ids["a"]]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_unknown_characters_become_bytes(sentence_piece: Tokenizer):
    assert sentence_piece.encode("€") == [sentence_piece.vocabulary.ids["▁"], *(3 + byte for byte in "€".encode())]


def naive_sentence_piece(text: str) -> list[str]:
    """The highest score first, the leftmost of equals, by the obvious loop."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-PIECES[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in PIECES]
        if not pairs:
            return parts
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(st.text(st.sampled_from("abol é€"), min_size=1, max_size=60))
def test_sentence_piece_agrees_with_the_naive_loop(sentence_piece: Tokenizer, text: str):
    ids = sentence_piece.vocabulary.ids
    expected = [i for part in naive_sentence_piece(text) for i in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]
    assert sentence_piece.encode(text) == expected


def test_a_long_run_and_a_new_segment_cost_no_recursion(sentence_piece: Tokenizer):
    assert sentence_piece.decode(sentence_piece.encode("ab" * 50_000)) == "ab" * 50_000


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff"])
def test_half_characters_become_replacement_characters(byte_pair: Tokenizer, sentence_piece: Tokenizer, text: str):
    expected = "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)
    for tokenizer in (byte_pair, sentence_piece):
        assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.mark.parametrize("text", [b"a", None, ["a"]])
def test_only_text_is_encoded(byte_pair: Tokenizer, text: object):
    with pytest.raises(InvalidArgumentError, match=f"is a {type(text).__name__}, expected a str"):
        byte_pair.encode(text)  # type: ignore[arg-type]


def test_an_opened_model_is_as_good_as_a_path(vocabularies: Vocabularies):
    with open_model(vocabularies.file("gpt-2")) as model:
        tokenizer = Tokenizer.from_gguf(model)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.vocab_size == 50257


# -- decoding
@given(TEXTS)
def test_byte_pair_round_trip(byte_pair: Tokenizer, text: str):
    assert byte_pair.decode(byte_pair.encode(text, add_special=True)) == text


@given(TEXTS)
def test_sentence_piece_round_trip(sentence_piece: Tokenizer, text: str):
    # U+2581 itself stands for a space and cannot be told from one.
    assert sentence_piece.decode(sentence_piece.encode(text.replace("<u>", ""), add_special=True)) == text.replace("<u>", "").replace(
        "▁", " "
    )


@settings(max_examples=30)
@given(text=TEXTS)
@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_real_vocabularies_round_trip(vocabularies: Vocabularies, name: str, text: str):
    tokenizer = vocabularies.tokenizer(name)
    assert tokenizer.decode(tokenizer.encode(text)) == (text if name == "gpt-2" else text.replace("▁", " "))


def test_control_tokens_are_no_text_unless_asked_for(byte_pair: Tokenizer):
    ids = [259, *b"a", 262, 260]
    assert byte_pair.decode(ids) == "a<u>"
    assert byte_pair.decode(ids, skip_special=False) == "<s>a<u></s>"


@given(text=st.text(st.sampled_from("ab lo<u>▁é😀"), max_size=40))
@pytest.mark.parametrize("kind", ["byte_pair", "sentence_piece"])
def test_no_token_stands_for_more_characters_than_the_longest(request: pytest.FixtureRequest, kind: str, text: str):
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    assert len(text) <= tokenizer.longest_token_chars * len(tokenizer.encode(text, parse_special=True))


@pytest.mark.parametrize("ids", ["abc", b"abc", 5, [1.0], ["a"], [True], [None], [-1], [10**9]])
def test_what_are_no_ids_is_refused(byte_pair: Tokenizer, ids: Any):
    with pytest.raises(InvalidArgumentError, match="token id"):
        byte_pair.decode(ids)


def test_a_source_that_is_no_path_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"Tokenizer.from_gguf takes the path of a model, not 5"):
        Tokenizer.from_gguf(5)
    with pytest.raises(InvalidArgumentError, match=r"Tokenizer.from_gguf takes a TokenizerConfig, not 5"):
        Tokenizer.from_gguf("x.gguf", 5)


def test_numbers_of_numpy_are_ids(byte_pair: Tokenizer):
    assert byte_pair.decode(np.array([97, 98])) == byte_pair.decode([np.int32(97), 98]) == "ab"


def test_ids_that_continue_a_text_keep_their_space(sentence_piece: Tokenizer):
    ids = [1, sentence_piece.vocabulary.ids["▁a"]]
    assert sentence_piece.decode(ids) == "a"
    assert sentence_piece.decode(ids, from_start=False) == " a"
    decoder = sentence_piece.incremental()
    assert [decoder.push(i) for i in ids] == ["", " a"]


@pytest.mark.parametrize("token_id", [-1, 265, 10**9])
def test_ids_outside_the_vocabulary_are_refused(byte_pair: Tokenizer, token_id: int):
    with pytest.raises(InvalidArgumentError, match=rf"token id {token_id} is outside the vocabulary \(0 to 264\)"):
        byte_pair.decode([token_id])


def is_whole(data: bytes) -> bool:
    """Whether no character is left incomplete at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0] == b""


@given(numbers=st.lists(st.integers(0, 264), max_size=30), skip_special=st.booleans(), from_start=st.booleans())
@pytest.mark.parametrize("kind", ["byte_pair", "sentence_piece"])
def test_pushes_joined_equal_decoding_at_once(
    request: pytest.FixtureRequest, kind: str, numbers: list[int], skip_special: bool, from_start: bool
):
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = [tokenizer.vocab_size - 1 - number for number in numbers]  # the interesting tokens stand at the end
    decoder = tokenizer.incremental(skip_special, from_start)
    pushed = [decoder.push(i) for i in ids]
    assert "".join(pushed) + decoder.flush() == tokenizer.decode(ids, skip_special, from_start)
    for n in range(len(ids) + 1):  # nothing is held back that could be said
        data = tokenizer.incremental(skip_special, from_start).take_bytes(ids[:n])
        assert "".join(pushed[:n]) == data.decode("utf-8", "replace") or not is_whole(data)


def test_a_character_comes_whole_and_a_broken_one_as_soon_as_it_is_certain(byte_pair: Tokenizer):
    decoder = byte_pair.incremental()
    assert [decoder.push(i) for i in "€".encode()] == ["", "", "€"]
    assert [decoder.push(i) for i in b"\xe2\x82a"] == ["", "", "\ufffda"]
    assert decoder.push(0xF0) + decoder.push(0x9F) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(264) == "\ufffd"  # <0xFF> begins no character
