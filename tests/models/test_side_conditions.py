"""What a family takes for granted, does not read, or also accepts: two files that must mean the same give the same bits, and what is read
changes them. Each pair was held against the oracle once."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

import tiny_models
from models.driving import logits_along, runner
from tiny_models import TinyModel
from vllm_cpp.errors import ModelLoadError

PROMPT, GENERATED = [5, 17, 200, 33, 5, 5, 91, 260, 14, 7], [3, 4]
Edit = Callable[[TinyModel], None]


def keys(**values) -> Edit:
    """Keys under the architecture's prefix, "__" for a dot."""
    return lambda model: [model.key(f"{model.arch}.{name.replace('__', '.')}", value) for name, value in values.items()]


def without(*names) -> Edit:
    return lambda model: [model.kvs.pop(f"{model.arch}.{name}") for name in names]


def head(*, own: bool) -> Edit:
    """The embedding as the head: a copy of its own, or none in the file."""

    def edit(model):
        model.tensors.pop("output.weight", None)
        if own:
            model.tensors["output.weight"] = model.tensors["token_embd.weight"]

    return edit


def vector(name: str, width: int, std: float = 0.3) -> Edit:
    return lambda model: model.vector(name, width, std=std)


def one_matrix(*, biases: int) -> Edit:
    """q, k and v from one matrix, and so many biases beside it: one, or three with the same values."""

    def edit(model):
        for name in [name for name in model.tensors if name.endswith("attn_q.weight")]:
            names = [name.replace("attn_q", f"attn_{part}") for part in "qkv"]
            parts = [model.tensors.pop(part) for part in names]
            widths = [part.dims[1] for part in parts]
            whole = np.concatenate([np.frombuffer(part.data, "<f4") for part in parts])
            model.floats(name.replace("attn_q", "attn_qkv"), whole.reshape(sum(widths), -1))
            values = np.random.default_rng(1).standard_normal(sum(widths))
            if biases == 1:
                model.floats(name.replace("attn_q.weight", "attn_qkv.bias"), values)
            else:
                for part, of_part in zip(names, np.split(values, np.cumsum(widths)[:-1]), strict=True):
                    model.floats(part.replace("weight", "bias"), of_part)

    return edit


def factors(name: str, scaling: str, original_context: int) -> Edit:
    """A factor for each pair, drawn by chance, in the tensor of that name; nonsense in the one beside it."""

    def edit(model):
        keys(rope__scaling__type=scaling, rope__scaling__factor=2.0, rope__scaling__original_context_length=original_context)(model)
        width = (
            model.tensors["blk.0.attn_q.weight"].dims[1] // struct.unpack_from("<I", model.kvs[f"{model.arch}.attention.head_count"], 4)[0]
        )
        for other in ("rope_factors_long.weight", "rope_factors_short.weight") if scaling == "longrope" else ():
            model.floats(other, np.full(width // 2, 1e9))
        model.tensors.pop(name, None)
        model.floats(name, np.random.default_rng(2).uniform(1, 8, width // 2))

    return edit


def nothing(_: TinyModel) -> None:
    pass


SAME: Iterable[tuple[str, str, Edit, Edit]] = [
    ("nemotron_h", "a tied head", head(own=True), head(own=False)),
    ("nemotron_h", "one epsilon for both norms", nothing, without("attention.layer_norm_rms_epsilon")),
    ("nemotron_h", "a bias of zeros", nothing, vector("blk.3.attn_output.bias", 256, 0)),
    ("nemotron_h_moe", "always a sigmoid", nothing, keys(expert_gating_func=1)),
    ("nemotron_h_moe", "one group is none", nothing, without("expert_group_count", "expert_group_used_count")),
    (
        "nemotron_h_moe", "experts share feed_forward_length", nothing,
        lambda m: [without("expert_feed_forward_length")(m), keys(feed_forward_length=[0, 512, 0, 0, 512])(m)],
    ),
    ("nemotron_h_moe", "a scale of 0 is none", keys(expert_weights_scale=0.0), without("expert_weights_scale")),
    (
        "granitehybrid", "scales of 0 are none",
        keys(embedding_scale=0.0, residual_scale=0.0, attention__scale=0.0, logit_scale=0.0),
        without("embedding_scale", "residual_scale", "attention.scale", "logit_scale"),
    ),
    ("granitehybrid", "turned unless said otherwise", keys(rope__scaling__finetuned=True), without("rope.scaling.finetuned")),
    ("granitehybrid", "softmax, normalized, not scaled", nothing, keys(expert_gating_func=2, expert_weights_scale=3.0)),
    ("granitehybrid", "a tied head", head(own=True), head(own=False)),
    (
        "jamba", "softmax, as it is", nothing,
        keys(expert_gating_func=2, expert_weights_norm=True, expert_weights_scale=3.0, leading_dense_block_count=2),
    ),
    ("jamba", "a tied head", head(own=True), head(own=False)),
    ("lfm2moe", "normalized, not scaled", nothing, keys(expert_weights_norm=False, expert_weights_scale=3.0)),
    ("lfm2moe", "a head of its own", nothing, head(own=True)),
    ("gpt-oss", "every other layer slides", nothing, keys(attention__sliding_window_pattern=2)),
    ("gpt-oss", "flags are as good as a period", nothing, keys(attention__sliding_window_pattern=[True, False])),
    ("gpt-oss", "one base for both kinds of layers", nothing, keys(rope__freq_base_swa=150000.0)),
    ("gpt-oss", "its own yarn and router", nothing, keys(rope__scaling__yarn_beta_fast=4.0, expert_gating_func=2)),
    ("mistral3", "a temperature of 0 is none", keys(attention__temperature_scale=0.0), without("attention.temperature_scale")),
    ("minimax-m2", "one bias or three beside one matrix", one_matrix(biases=1), one_matrix(biases=3)),
    (
        "llama", "the factors of a long context", factors("rope_freqs.weight", "linear", 16),
        factors("rope_factors_long.weight", "longrope", 16),
    ),
    (
        "llama", "the factors of a short context", factors("rope_freqs.weight", "linear", 100000),
        factors("rope_factors_short.weight", "longrope", 100000),
    ),
    (
        "granitemoe", "the factors of a long context", factors("rope_freqs.weight", "linear", 500),
        factors("rope_factors_long.weight", "longrope", 500),
    ),
    ("bailingmoe3", "sections of which one is empty are none", nothing, keys(rope__dimension_sections=[4, 0, 4, 0])),
    ("bailingmoe3", "three sections turn", keys(rope__dimension_sections=[2, 2, 2, 0]), keys(rope__dimension_sections=[1, 3, 9, 0])),
    ("laguna", "the first of four sees everything", nothing, keys(attention__sliding_window_pattern=4)),
    ("laguna", "a window of 0 is none", keys(attention__sliding_window=0), without("attention.sliding_window")),
    ("laguna", "its own yarn", nothing, without("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")),
    ("laguna", "a sigmoid unless said otherwise", nothing, without("expert_gating_func")),
    ("laguna", "a tied head", head(own=True), head(own=False)),
    ("gemma4", "a cap of 30 unless said otherwise", nothing, without("final_logit_softcapping")),
    ("gemma4", "a base of 10000 unless said otherwise", nothing, without("rope.freq_base_swa")),
    ("gemma4", "no shared keys unless said otherwise", nothing, without("attention.shared_kv_layers")),
    (
        "gemma4", "its own scale and router", nothing,
        keys(attention__scale=0.5, expert_weights_norm=False, expert_weights_scale=2.0, expert_gating_func=2),
    ),
    ("gemma4", "a tied head", head(own=True), head(own=False)),
]  # fmt: skip
DIFFERENT: Iterable[tuple[str, str, Edit]] = [
    ("nemotron_h", "epsilon", keys(attention__layer_norm_rms_epsilon=0.05)),
    ("nemotron_h", "a bias of attention's output", vector("blk.3.attn_output.bias", 256)),
    ("nemotron_h", "a bias of a feed-forward part", vector("blk.1.ffn_up.bias", 256)),
    ("nemotron_h_moe", "groups", keys(expert_group_count=4, expert_group_used_count=1)),
    ("nemotron_h_moe", "weights as they are", keys(expert_weights_norm=False)),
    ("granitehybrid", "turned attention", keys(rope__scaling__finetuned=True)),
    ("granitehybrid", "a bias of attention's output", vector("blk.2.attn_output.bias", 64)),
    ("jamba", "groups", keys(expert_group_count=2, expert_group_used_count=1)),
    ("lfm2moe", "softmax", keys(expert_gating_func=1)),
    ("gpt-oss", "a longer period", keys(attention__sliding_window_pattern=3)),
    ("gpt-oss", "a base of sliding layers", keys(rope__freq_base_swa=1000.0)),
    ("gpt-oss", "a shorter window", keys(attention__sliding_window=2)),
    ("mistral3", "temperature", keys(attention__temperature_scale=1.0)),
    ("mistral3", "yarn's betas", keys(rope__scaling__yarn_beta_fast=8.0, rope__scaling__yarn_beta_slow=0.3)),
    ("mistral3", "yarn's multiplier", keys(rope__scaling__yarn_log_multiplier=0.0)),
    ("bailingmoe3", "sections", keys(rope__dimension_sections=[2, 2, 2, 0])),
    ("laguna", "a shorter period", keys(attention__sliding_window_pattern=2, attention__sliding_window=3)),
    ("laguna", "turning values of sliding layers", without("rope.dimension_count_swa")),
    ("laguna", "a base of sliding layers", keys(rope__freq_base_swa=100.0)),
    ("laguna", "groups", keys(expert_group_count=4, expert_group_used_count=2)),
    ("gemma4", "no cap", keys(final_logit_softcapping=0.0)),
    ("gemma4", "turning values of sliding layers", keys(rope__dimension_count_swa=32)),
    ("gemma4", "scaled positions of full layers", keys(rope__scaling__type="linear", rope__scaling__factor=4.0)),
]


def logits(path: Path, family: str, edit: Edit) -> np.ndarray:
    model = tiny_models.build(family, 5, dtype="F32")
    edit(model)
    with runner(model.write(path)) as loaded:
        return logits_along(loaded, PROMPT, GENERATED)


@pytest.mark.parametrize(("family", "what", "one", "other"), SAME, ids=[f"{family}: {what}" for family, what, *_ in SAME])
def test_files_that_mean_the_same(family, what, one, other, tmp_path):
    assert np.array_equal(logits(tmp_path / "one.gguf", family, one), logits(tmp_path / "other.gguf", family, other))


@pytest.mark.parametrize(("family", "what", "edit"), DIFFERENT, ids=[f"{family}: {what}" for family, what, _ in DIFFERENT])
def test_what_is_read_makes_a_difference(family, what, edit, tmp_path):
    one, other = logits(tmp_path / "one.gguf", family, nothing), logits(tmp_path / "other.gguf", family, edit)
    assert np.abs(one - other).max() > 1e-3 * np.abs(one).max()


def test_a_long_context_needs_its_factors(tmp_path):
    with pytest.raises(ModelLoadError, match=r"tensor 'rope_factors_long\.weight' is missing"):
        logits(tmp_path / "one.gguf", "llama", keys(rope__scaling__type="longrope", rope__scaling__original_context_length=16))


@pytest.mark.parametrize("family", ["deepseek2", "deepseek4"])
def test_latent_families_have_no_long_context_factors(family, tmp_path):
    refusal = rf"one\.gguf: key '{family}\.rope\.scaling\.type' at byte \d+: is 'longrope', expected none, linear or yarn"
    with pytest.raises(ModelLoadError, match=refusal):
        logits(tmp_path / "one.gguf", family, keys(rope__scaling__type="longrope"))
