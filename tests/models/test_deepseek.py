"""What the deepseek families read out of keys: temperatures, defaults, refusals; a context as long as the state has room for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import oracle
from models.driving import runner
from tiny_models import TinyModel
from vllm_cpp import models
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import open_model
from vllm_cpp.gguf_file.hparams import HyperParameters, read_hyper_parameters
from vllm_cpp.kernels.cpu import router
from vllm_cpp.models.families import deepseek2
from vllm_cpp.scheduler.batch import Chunk


def hyper_parameters(path: Path) -> HyperParameters:
    with open_model(path) as model:
        return read_hyper_parameters(model)


@pytest.mark.parametrize(
    ("scaling", "multiplier", "magnitude", "temperature"),
    [
        ("yarn", 0.707, 0.5, 0.5 * (1 + 0.1 * math.log(40) * 0.707)),
        ("yarn", 0.0, 0.5 * (1 + 0.1 * math.log(40)), 0.5 * (1 + 0.1 * math.log(40))),
        ("none", 0.707, 0.5, 0.5),
        ("linear", 0.707, 0.5, 0.5 * (1 + 0.1 * math.log(40)) * (1 + 0.1 * math.log(40) * 0.707)),
    ],
)
def test_where_yarn_puts_its_warmth(tiny_model, scaling, multiplier, magnitude, temperature):
    hp = hyper_parameters(tiny_model("deepseek2-lite-s1-z0-F32"))
    factor = 1.0 if scaling == "none" else 40.0
    hp = replace(hp, rope=replace(hp.rope, scaling=scaling, factor=factor, attn_factor=0.5))
    assert deepseek2.magnitude_and_temperature(hp, multiplier) == pytest.approx((magnitude, temperature), rel=1e-12)


@pytest.mark.parametrize(("layers", "vocabulary", "scores"), [(47, 154880, "sigmoid"), (48, 154880, "sigmoid"), (47, 320, "softmax")])
def test_a_missing_gating_function(tiny_model, layers, vocabulary, scores):
    hp = replace(hyper_parameters(tiny_model("deepseek2-lite-s1-z0-F32")), num_layers=layers, vocab_size=vocabulary)
    assert deepseek2.traits_of(hp).expert_scores == {"sigmoid": router.SIGMOID, "softmax": router.SOFTMAX}[scores]


def edited(case: str, path: Path, **keys: object) -> Path:
    model: TinyModel = oracle.cases()[case].model()
    model.keys({key.replace("__", "."): value for key, value in keys.items()})
    return model.write(path / "model.gguf")


@pytest.mark.parametrize(
    ("case", "keys", "text"),
    [
        ("deepseek2-s1-z0-F32", {"rope__dimension_count": 48}, r"rope.dimension_count.* is 48, expected less than a head's length, 48"),
        ("deepseek2-s1-z0-F32", {"attention__kv_lora_rank": 32}, r"attn_k_b.weight.* has shape \(4, 64, 32\), expected \(4, 32, 32\)"),
        ("deepseek4-s3-z0-F32", {"hyper_connection__count": 2}, r"hyper_connection.count.* is 2, expected 4"),
        ("deepseek4-s3-z0-F32", {"attention__output_group_count": 3}, r"output_group_count.* is 3, which does not divide"),
        ("deepseek4-s3-z0-F32", {"attention__compress_ratios": [0, 0, 8, 128]}, r"compress_ratios.* expected one of \(0, 4, 128\)"),
        ("deepseek4-s3-z0-F32", {"attention__compress_ratios": [0, 4]}, r"compress_ratios.* for each of 4 layers"),
        ("deepseek4-s3-z0-F32", {"expert_gating_func": 2}, r"expert_gating_func.* is 2, expected 4"),
    ],
)
def test_refusals_name_the_key_or_tensor(tmp_path, case, keys, text):
    with pytest.raises(ModelLoadError, match=text), runner(edited(case, tmp_path, **keys)):
        pass


def test_the_state_of_deepseek4_is_not_sized_by_the_context_it_was_trained_for(tmp_path):
    path = edited("deepseek4-s3-z0-F32", tmp_path, context_length=1 << 20)
    with open_model(path) as model:
        hp = read_hyper_parameters(model)
    params = EngineParams(model_path="-", block_size=32)
    assert models._sizes(params, hp, 0, True)[1] == models.DEFAULT_NUM_BLOCKS * 32
    assert models._sizes(replace(params, max_model_len=100_000), hp, 0, True)[1] == 100_000
    assert models._sizes(params, hp, 0, False)[1] == 1 << 20
    with runner(path) as loaded:
        assert loaded.max_model_len == models.DEFAULT_NUM_BLOCKS * loaded.block_size


def test_a_window_longer_than_the_longest_sequence(tmp_path):
    """All tokens are seen then, and the ring is no longer than the sequence."""
    ids = np.random.default_rng(3).integers(0, 300, 70).tolist()
    rows = []
    for name, window in (("long", 100_000), ("exact", 70)):
        folder = tmp_path / name
        folder.mkdir()
        with runner(edited("deepseek4-s3-z0-F32", folder, attention__sliding_window=window)) as loaded:
            loaded.run([Chunk(ids[:33], 0, [0, 1], False)])
            rows.append(loaded.run([Chunk(ids[33:], 33, [0, 1, 2], True)])[0].copy())
    assert np.array_equal(rows[0], rows[1])


def test_a_key_that_counts_draft_layers_which_were_left_out(tmp_path):
    """deepseek4 files without draft layers may keep the key: the last layer is an ordinary one then."""
    rows = []
    for name, keys in (("without", {}), ("with", {"nextn_predict_layers": 1})):
        folder = tmp_path / name
        folder.mkdir()
        with runner(edited("deepseek4-s3-z0-F32", folder, **keys)) as loaded:
            rows.append(loaded.run([Chunk([5, 6, 7], 0, [0], True)])[0].copy())
    assert np.array_equal(rows[0], rows[1])
