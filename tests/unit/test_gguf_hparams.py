"""Hyper-parameters: what the tiny models say of themselves, the defaults, and every refusal by the key's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiny_models import build
from tiny_models.container import file_bytes, value
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import open_model
from vllm_cpp.gguf_file.hparams import HyperParameters, Rope, read_hyper_parameters

# The least an attention model may say.
LEAST = {
    "general.architecture": "x",
    "x.block_count": 3,
    "x.context_length": 128,
    "x.embedding_length": 96,
    "x.attention.head_count": 6,
    "x.attention.layer_norm_rms_epsilon": 0.5,
    "tokenizer.ggml.tokens": ["a", "b", "c", "d"],
}


def read(folder: Path, **changes: Any) -> HyperParameters:
    """The hyper-parameters of LEAST with changes; keys have __ for dots, None removes one, bytes are written as they are."""
    kvs = {**LEAST, **{key.replace("__", "."): v for key, v in changes.items()}}
    written = {key: v if isinstance(v, bytes) else value(v) for key, v in kvs.items() if v is not None}
    path = folder / "m.gguf"
    path.write_bytes(file_bytes(written, {}))
    with open_model(path) as model:
        return read_hyper_parameters(model)


def test_of_a_tiny_model(tiny_model) -> None:
    with open_model(tiny_model("qwen2moe-s1-z1-F32")) as model:
        hp = read_hyper_parameters(model)
    assert (hp.architecture, hp.vocab_size, hp.context_length, hp.embedding_length) == ("qwen2moe", 320, 512, 192)
    assert (hp.block_count, hp.num_layers, hp.num_heads, hp.num_kv_heads) == (3, 3, (6, 6, 6), (2, 2, 2))
    assert (hp.key_length, hp.value_length, hp.feed_forward_length) == (32, 32, (192, 192, 192))
    assert (hp.num_experts, hp.top_k, hp.expert_feed_forward_length) == (15, (4, 4, 4), (96, 96, 96))
    assert hp.shared_expert_feed_forward_length == 224
    assert hp.rms_epsilon == pytest.approx(1e-6)


def test_of_a_scaled_rope(tiny_model) -> None:
    with open_model(tiny_model("llama_yarn-s1-z1-F32")) as model:
        rope = read_hyper_parameters(model).rope
    assert rope == Rope(
        dimension_count=96,
        freq_base=500000.0,
        scaling="yarn",
        factor=16.0,
        original_context_length=64,
        attn_factor=pytest.approx(0.9),
    )


def test_defaults(tmp_path: Path) -> None:
    hp = read(tmp_path)
    assert (hp.num_kv_heads, hp.key_length, hp.value_length) == (hp.num_heads, 16, 16)
    assert hp.rope == Rope(
        dimension_count=16, freq_base=10000.0, scaling="linear", factor=1.0, original_context_length=128, attn_factor=1.0
    )
    assert (hp.num_experts, hp.top_k, hp.feed_forward_length, hp.expert_feed_forward_length) == (0, (0,) * 3, (0,) * 3, (0,) * 3)
    assert (hp.expert_weights_scale, hp.expert_weights_norm, hp.expert_gating_func) == (0.0, False, None)
    assert (hp.num_expert_groups, hp.num_leading_dense_layers, hp.num_shared_experts) == (0, 0, 0)


def test_head_length_need_not_divide_the_width(tmp_path: Path) -> None:
    hp = read(tmp_path, x__attention__head_count=5, x__attention__key_length=32, x__attention__value_length=32)
    assert (hp.num_heads, hp.key_length) == ((5,) * 3, 32)


@pytest.mark.parametrize("kind", ["i32", "u32"])
def test_arrays_give_a_number_for_each_layer(tmp_path: Path, kind: str) -> None:
    hp = read(
        tmp_path,
        x__attention__head_count=value([6, 3, 6], kind),
        x__attention__head_count_kv=value([2, 3, 1], kind),
        x__feed_forward_length=value([64, 0, 32], kind),
        x__expert_count=8,
        x__expert_used_count=value([2, 8, 1], kind),
        x__expert_feed_forward_length=value([4, 5, 6], kind),
    )
    assert (hp.num_heads, hp.num_kv_heads) == ((6, 3, 6), (2, 3, 1))
    assert (hp.feed_forward_length, hp.expert_feed_forward_length, hp.top_k) == ((64, 0, 32), (4, 5, 6), (2, 8, 1))


def test_layers_that_predict_further_tokens_do_not_run(tmp_path: Path) -> None:
    hp = read(tmp_path, x__nextn_predict_layers=1)
    assert (hp.block_count, hp.num_layers, len(hp.num_heads)) == (3, 2, 3)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"x__rope__scaling__factor": 4.0}, 4.0),
        ({"x__rope__scaling__factor": 0.0}, 1.0),
        ({"x__rope__scale_linear": 2.0}, 2.0),
        ({"x__rope__scale_linear": 2.0, "x__rope__scaling__factor": 8.0}, 8.0),
        ({"x__rope__scaling__type": "none", "x__rope__scaling__factor": 8.0}, 1.0),
    ],
)
def test_rope_factor(tmp_path: Path, changes: dict[str, Any], factor: float) -> None:
    assert read(tmp_path, **changes).rope.factor == factor


EXPERTS = {"x__expert_count": 8, "x__expert_used_count": 2}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        *(({key.replace(".", "__"): None}, rf"key '{key}': missing") for key in LEAST),
        ({"x__block_count": "3"}, r"'x\.block_count' at byte \d+: is str"),
        ({"x__block_count": 0}, r"'x\.block_count' at byte \d+: is 0, expected 1 to 1024"),
        ({"x__block_count": value(0xFFFFFFFF, "u32")}, r"'x\.block_count' at byte \d+: is 4294967295, expected 1 to 1024"),
        ({"x__nextn_predict_layers": 3}, r"'x\.nextn_predict_layers' at byte \d+: is 3, expected fewer than block_count, 3"),
        ({"x__context_length": 0}, r"'x\.context_length' at byte \d+: is 0"),
        ({"x__embedding_length": 0}, r"'x\.embedding_length' at byte \d+: is 0"),
        ({"x__attention__head_count": 0}, r"'x\.attention\.head_count' at byte \d+: is 0"),
        ({"x__attention__head_count": 5}, r"'x\.attention\.key_length': missing, and embedding_length, 96, is not a multiple"),
        ({"x__attention__head_count": [6, 6]}, r"'x\.attention\.head_count' at byte \d+: has 2 elements, but block_count is 3"),
        ({"x__attention__head_count": [6, -6, 6]}, r"'x\.attention\.head_count' at byte \d+: holds -6 to 6"),
        ({"x__attention__head_count": [6.0, 6.0, 6.0]}, r"'x\.attention\.head_count' at byte \d+: is array of f32"),
        ({"x__attention__head_count_kv": 4}, r"'x\.attention\.head_count_kv' at byte \d+: is 4 in layer 0, which does not divide"),
        ({"x__attention__head_count_kv": [6, 6, 12]}, r"is 12 in layer 2, which does not divide"),
        ({"x__attention__key_length": 0}, r"'x\.attention\.key_length' at byte \d+: is 0"),
        ({"x__attention__layer_norm_rms_epsilon": 0.0}, r"'x\.attention\.layer_norm_rms_epsilon' at byte \d+: is 0\.0"),
        ({"x__attention__layer_norm_rms_epsilon": float("nan")}, r"layer_norm_rms_epsilon' at byte \d+: is nan, expected a finite"),
        ({"x__rope__dimension_count": 7}, r"'x\.rope\.dimension_count' at byte \d+: is 7, expected an even number up to .* 16"),
        ({"x__rope__dimension_count": 18}, r"'x\.rope\.dimension_count' at byte \d+: is 18"),
        ({"x__rope__freq_base": float("inf")}, r"'x\.rope\.freq_base' at byte \d+: is inf"),
        ({"x__rope__freq_base": -1.0}, r"'x\.rope\.freq_base' at byte \d+: is -1\.0"),
        ({"x__rope__scaling__type": "cubic"}, r"'x\.rope\.scaling\.type' at byte \d+: is 'cubic', expected one of none, linear"),
        ({"x__rope__scaling__factor": -2.0}, r"'x\.rope\.scaling\.factor' at byte \d+: is -2\.0"),
        ({"x__rope__scaling__original_context_length": 0}, r"original_context_length' at byte \d+: is 0"),
        ({"x__rope__scaling__attn_factor": 0.0}, r"attn_factor' at byte \d+: is 0\.0"),
        ({"x__expert_count": 5000}, r"'x\.expert_count' at byte \d+: is 5000, expected 0 to 4096"),
        ({"x__expert_count": 8}, r"'x\.expert_used_count': is 0, expected 1 to expert_count, 8"),
        ({**EXPERTS, "x__expert_used_count": 9}, r"'x\.expert_used_count' at byte \d+: is 9, but expert_count is 8"),
        ({"x__expert_used_count": 2}, r"'x\.expert_used_count' at byte \d+: is 2, but expert_count is 0"),
        ({**EXPERTS, "x__expert_group_count": 3}, r"'x\.expert_group_count' at byte \d+: is 3, of which 0 are used"),
        ({**EXPERTS, "x__expert_group_count": 4, "x__expert_group_used_count": 5}, r"is 4, of which 5 are used"),
        ({**EXPERTS, "x__expert_gating_func": 5}, r"'x\.expert_gating_func' at byte \d+: is 5, expected 1 to 4"),
        ({**EXPERTS, "x__expert_weights_norm": 1}, r"'x\.expert_weights_norm' at byte \d+: is u32, expected a bool"),
        ({**EXPERTS, "x__expert_weights_scale": -1.0}, r"'x\.expert_weights_scale' at byte \d+: is -1\.0"),
        ({"x__leading_dense_block_count": 4}, r"'x\.leading_dense_block_count' at byte \d+: is 4, expected 0 to 3"),
        ({"x__feed_forward_length": "wide"}, r"'x\.feed_forward_length' at byte \d+: is str"),
        # -- the vocabulary's arrays
        ({"tokenizer__ggml__tokens": []}, r"'tokenizer\.ggml\.tokens' at byte \d+: is array of i32 of length 0"),
        ({"tokenizer__ggml__tokens": "abc"}, r"'tokenizer\.ggml\.tokens' at byte \d+: is str"),
        ({"tokenizer__ggml__scores": [0.0, 1.0]}, r"'tokenizer\.ggml\.scores' at byte \d+: has 2 elements, but there are 4 tokens"),
        ({"tokenizer__ggml__scores": [0, 1, 2, 3]}, r"'tokenizer\.ggml\.scores' at byte \d+: is array of i32, expected an array of f32"),
        ({"tokenizer__ggml__token_type": [1] * 5}, r"'tokenizer\.ggml\.token_type' at byte \d+: has 5 elements"),
        ({"tokenizer__ggml__eos_token_id": 4}, r"'tokenizer\.ggml\.eos_token_id' at byte \d+: is 4, but there are 4 tokens"),
        ({"tokenizer__ggml__bos_token_id": value(-1, "i32")}, r"'tokenizer\.ggml\.bos_token_id' at byte \d+: is -1"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelLoadError, match=text):
        read(tmp_path, **changes)


def test_an_absurd_layer_count_allocates_nothing(tmp_path: Path) -> None:
    """Refused by range before a tuple of that length is made."""
    with pytest.raises(ModelLoadError, match="block_count"):
        read(tmp_path, x__block_count=0x7FFFFFFF, x__attention__head_count=[6] * 10)


def test_padding_ids_of_nowhere_are_left_alone(tmp_path: Path) -> None:
    assert read(tmp_path, tokenizer__ggml__padding_token_id=4, tokenizer__ggml__eos_token_id=3).vocab_size == 4


def test_every_family_can_be_read(tmp_path: Path) -> None:
    for family in ("llama_moe", "qwen2", "qwen3", "olmoe"):
        for size in (0, 1):
            with open_model(build(family, 1, size).write(tmp_path / "m.gguf")) as model:
                assert read_hyper_parameters(model).vocab_size == 320
