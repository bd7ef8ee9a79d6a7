"""What a file may say about its vocabulary, what is refused, what is repaired, and what stays of it in memory: nothing."""

from __future__ import annotations

import ctypes
import gc
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_models.container import value
from vllm_cpp import log
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.tokenizer import Tokenizer
from vllm_cpp.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, byte_letters, byte_pair_keys, file, sentence_piece_keys


@pytest.fixture
def load(tmp_path: Path):
    log.forget()

    def make(**keys: Any) -> Tokenizer:
        return Tokenizer.from_gguf(file(tmp_path / "v.gguf", **keys))

    return make


def without(keys: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: v for name, v in keys.items() if name not in names}


BPE = byte_pair_keys(["a b"], [("<s>", CONTROL), ("</s>", CONTROL)], bos_token_id=257, eos_token_id=258)
SPM = sentence_piece_keys({"a": -1.0})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (without(BPE, "model"), "'tokenizer.ggml.model'.*missing"),
        (BPE | {"model": "rwkv"}, "is 'rwkv'; supported are 'gpt2' .*'llama' .*'bert' .*'t5'"),
        (BPE | {"pre": "yawn"}, "'tokenizer.ggml.pre'.* is 'yawn', which is not among the supported: .*llama-bpe, .*qwen2"),
        (without(BPE, "tokens"), "'tokenizer.ggml.tokens'.*missing"),
        (BPE | {"tokens": value([1, 2])}, "is array of i32 .*expected an array of str"),
        (BPE | {"token_type": [NORMAL] * 258}, "has 258 elements, but there are 259 tokens"),
        (SPM | {"scores": [0.0] * 259}, "has 259 elements, but there are 260 tokens"),
        (SPM | {"scores": [0.0] * 258 + [float("nan")] * 2}, "of token 258 is not a number"),
        (BPE | {"bos_token_id": 259}, "'tokenizer.ggml.bos_token_id'.* is 259, but there are 259 tokens"),
        (BPE | {"eot_token_id": 4294967295}, "'tokenizer.ggml.eot_token_id'"),
        (without(BPE, "merges"), "'tokenizer.ggml.merges'.*missing"),
        (BPE | {"merges": value(["a b", "ab"], "str")}, "element 1 is 'ab', expected two texts with a space between"),
        (BPE | {"merges": value(["a b", " b"], "str")}, "element 1 is ' b', expected two texts"),
        (BPE | {"merges": value([1, 2])}, "'tokenizer.ggml.merges'.* is array of i32"),
        (
            without(BPE, "bos_token_id") | {"add_bos_token": True},
            "'tokenizer.ggml.add_bos_token'.* is true, but the file names no bos token",
        ),
        (
            without(BPE, "eos_token_id") | {"add_eos_token": True},
            "'tokenizer.ggml.add_eos_token'.* is true, but the file names no eos token",
        ),
        (sentence_piece_keys({}, [("<0xfF>", BYTE)]), "token 259 is of the byte kind but reads '<0xfF>'"),
        (sentence_piece_keys({}, [("<0x100>", BYTE)]), "token 259 is of the byte kind"),
        (
            {"model": "llama", "tokens": ["a"], "scores": [0.0], "token_type": [NORMAL]},
            "neither a token for byte 0x00 nor one for unknown text",
        ),
    ],
)
def test_refused(load, keys: dict[str, Any], message: str):
    with pytest.raises(ModelLoadError, match=message):
        load(**keys)


def test_every_name_of_a_family_is_accepted(load):
    for pre in PRE_TOKENIZERS:
        load(**BPE | {"pre": pre}).encode("a")


def test_a_file_without_a_pre_tokenizer_is_warned_about_once(load, capfd: pytest.CaptureFixture[str]):
    keys = without(BPE, "pre")
    assert load(**keys).vocabulary.pre == load(**keys).vocabulary.pre == "default"
    assert capfd.readouterr().err.count("does not say how it cuts words (tokenizer.ggml.pre); taking 'default'") == 1


def test_merges_of_no_tokens_are_left_out(load, capfd: pytest.CaptureFixture[str]):
    tokenizer = load(**BPE | {"merges": value(["b c", "a b", "x yy"], "str")})
    assert tokenizer.encode("abc") == [256, *b"c"]
    assert "2 of 3 merges name texts that are no tokens" in capfd.readouterr().err


def test_the_first_of_equal_merges_counts(load):
    keys = byte_pair_keys(["a b", "b c"])
    assert load(**keys | {"merges": value(["a b", "b c", "a b"], "str")}).encode("abc") == [256, *b"c"]


def test_equal_and_empty_texts_are_tolerated(load):
    tokenizer = load(**byte_pair_keys(["a b"], [("ab", NORMAL), ("", CONTROL), ("", NORMAL), ("<u>", USER_DEFINED), ("<u>", USER_DEFINED)]))
    assert tokenizer.encode("ab<u>", parse_special=True) == [257, 261]
    assert tokenizer.decode([256, 257, 258, 259, 260, 261]) == "abab<u><u>"


def test_a_byte_without_a_token_gives_none_and_joins_no_neighbours(load):
    letters = byte_letters()
    gone = letters.index("b")
    keys = byte_pair_keys(["a c"])
    keys["tokens"], keys["token_type"] = keys["tokens"][:gone] + keys["tokens"][gone + 1 :], keys["token_type"][1:]
    tokenizer = load(**keys)
    joined = tokenizer.vocab_size - 1
    assert tokenizer.encode("ac") == [joined]
    assert tokenizer.encode("abc") == [letters.index("a"), letters.index("c") - 1]


def test_sentence_piece_without_bytes_falls_back_to_unknown(load):
    tokens = ["<unk>", "<s>", "</s>", "▁", "a"]
    keys = {"model": "llama", "tokens": tokens, "scores": [0.0] * 5, "token_type": [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL]}
    assert load(**keys).encode("aé") == [3, 4, 0, 0]


def test_a_file_without_kinds_has_ordinary_tokens(load):
    tokenizer = load(**without(BPE, "token_type"))
    assert tokenizer.encode("<s>", parse_special=True) == [*b"<s>"]
    assert tokenizer.vocabulary.kinds.dtype == np.uint8


@pytest.mark.parametrize(("kind", "expected"), [(CONTROL, (11, 11)), (NORMAL, (None, None))])
def test_the_usual_begin_and_end_ids_hold_only_where_the_token_looks_the_part(load, kind: int, expected: tuple[int | None, int | None]):
    keys = byte_pair_keys()
    keys["token_type"] = [kind if i == 11 else NORMAL for i in range(256)]
    tokenizer = load(**keys | {"pre": "llama-bpe"})
    assert (tokenizer.bos_id, tokenizer.eos_id) == expected
    assert tokenizer.add_bos == (expected[0] is not None)


def test_ends_are_found_by_key_and_by_text_whatever_their_kind(load):
    extra = [
        ("<|im_end|>", NORMAL),
        ("<x>", CONTROL),
        ("<y>", CONTROL),
        ("<|fim_pad|>", NORMAL),
        ("<|file_sep|>", USER_DEFINED),
        ("<|fim_prefix|>", NORMAL),
    ]
    tokenizer = load(**byte_pair_keys(extra=extra, eos_token_id=257, eom_token_id=258))
    assert tokenizer.eos_ids == {256, 257, 258, 259, 260}
    assert tokenizer.decode([256, 259, 260, 261]) == ""  # repaired: all of these are control tokens


def test_a_fill_token_named_by_a_key_is_not_looked_for(load):
    extra = [("<|fim_pad|>", NORMAL), ("<p>", NORMAL)]
    tokenizer = load(**byte_pair_keys(extra=extra, fim_pad_token_id=257))
    assert tokenizer.eos_ids == {257}
    assert tokenizer.decode([256, 257]) == "<|fim_pad|><p>"


def test_harmony_marks_are_text_and_its_end_of_message_does_not_end(load):
    extra = [(text, CONTROL) for text in ("<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|message|>", "<|start|>")]
    tokenizer = load(**byte_pair_keys(extra=extra))
    assert tokenizer.eos_ids == {256, 257}
    assert tokenizer.decode(range(256, 262)) == "<|end|><|channel|><|message|><|start|>"
    assert load(**byte_pair_keys(extra=extra[1:3])).eos_ids == {256, 257}  # without <|return|> it is not harmony


def character_pair_keys(**others):
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "<bos>", "a", "\u2581", "\n", "\n\n\n", "a\u2581", "a\u2581a"]
    kinds = [BYTE] * 256 + [CONTROL] + [NORMAL] * 6
    return {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": kinds,
        "merges": value(["a \u2581", "a\u2581 a"], "str"),
        "bos_token_id": 256,
        **others,
    }


def test_byte_pairs_over_characters(load):
    tokenizer = load(**character_pair_keys())
    a, space, line, lines, a_space, a_space_a = range(257, 263)
    for text, ids in {
        "a aa": [a_space_a, a],
        "  a ": [space, space, a_space],
        "\n\na\n\n\n": [line, line, a, lines],
        "\u00e9 a": [0xC3, 0xA9, space, a],
        "": [],
    }.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.longest_token_chars == 6


@pytest.mark.parametrize("said", [{}, {"add_bos_token": False}, {"add_bos_token": True}])
def test_gemma4_begins_with_a_token_whatever_its_file_says(load, said):
    assert load(**character_pair_keys(**said)).encode("a", add_special=True) == [256, 257]


def test_a_vocabulary_of_characters_needs_merges(load):
    keys = character_pair_keys()
    del keys["merges"]
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.merges"):
        load(**keys)


def test_gemma4_has_an_ordinary_strike_through_tag(load):
    tokenizer = load(**byte_pair_keys(extra=[("</s>", NORMAL), ("<|tool_response>", CONTROL)]))
    assert tokenizer.eos_ids == {257}
    assert tokenizer.decode([256]) == "</s>"


# -- memory
class Mallinfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def allocated_bytes() -> int:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    gc.collect()
    found = mallinfo()
    return found.uordblks + found.hblkhd


@pytest.mark.parametrize("keys", [BPE, SPM, character_pair_keys()], ids=lambda keys: keys["model"])
def test_a_tokenizer_that_is_gone_leaves_nothing_of_the_text_behind(load, keys):
    text = "\n".join(map("".join, product("ab", repeat=11)))  # 2048 words, each a line

    def use() -> None:
        assert load(**keys).encode(text)

    use()  # what the first one loads stays, and so does what the allocator keeps at hand
    before = allocated_bytes()
    for _ in range(5):
        use()
    left = allocated_bytes() - before
    assert left < 500_000, f"5 tokenizers left {left} bytes"  # 4 MB and more, if each leaves its words
