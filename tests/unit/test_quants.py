"""The table of encodings against gguf's, and the naive decoders against gguf's decoders."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from reference.decoders import DECODERS, decode
from tiny_models.blocks import UNIT_STD, random_blocks
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.quants import ENCODINGS, REMOVED, by_id

# gguf's table counts Q8_1, which never stands in a file, with two floats; ggml's block has two halves.
OTHER_SIZE = {"Q8_1": (32, 40)}
WITHOUT_GGUF_DECODER = {"F64", "Q1_0", "Q2_0"}


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda kind: kind.name)
def test_layout_is_that_of_gguf(kind: gguf.GGMLQuantizationType) -> None:
    row = ENCODINGS[kind.name]
    assert row.ggml_id == kind.value
    assert by_id(kind.value) is row
    assert OTHER_SIZE.get(row.name, (row.block_values, row.block_bytes)) == gguf.GGML_QUANT_SIZES[kind]


def test_every_id_has_one_row_or_was_removed() -> None:
    ids = sorted([row.ggml_id for row in ENCODINGS.values()] + list(REMOVED))
    assert ids == list(range(43))


def test_activation_follows_the_block() -> None:
    form = {1: "f32", 32: "a32", 64: "a32", 128: "a32", 256: "q8k"}
    unweighed = {"I8", "I16", "I32", "I64", "Q8_1", "Q8_K"}
    for name, row in ENCODINGS.items():
        expected = "bf16" if name == "BF16" else "none" if name in unweighed else form[row.block_values]
        assert row.activation == expected, name


def test_row_bytes_counts_whole_blocks() -> None:
    assert ENCODINGS["Q4_K"].row_bytes(512) == 288
    assert ENCODINGS["F16"].row_bytes(3) == 6
    with pytest.raises(ValueError, match=r"33 values do not fill Q8_0 blocks of 32"):
        ENCODINGS["Q8_0"].row_bytes(33)


def test_removed_and_unknown_ids_are_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match=r"Q4_0_8_8 \(ggml type 33\) was removed"):
        by_id(33)
    with pytest.raises(ModelLoadError, match=r"ggml type 43 is unknown"):
        by_id(43)


def blocks(encoding: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    if encoding in UNIT_STD:
        return random_blocks(encoding, 500, 1.0, rng)
    if encoding == "BF16":  # no infinities and NaNs
        return (rng.standard_normal(500, np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return rng.standard_normal(500).astype({"F32": "<f4", "F16": "<f2"}[encoding]).view(np.uint8)


@pytest.mark.parametrize("encoding", [name for name in DECODERS if name not in WITHOUT_GGUF_DECODER])
def test_naive_decoder_agrees_with_gguf(encoding: str) -> None:
    data = blocks(encoding).reshape(-1)
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[encoding]).reshape(-1)
    got = decode(encoding, data)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)


def test_naive_decoders_that_gguf_has_not() -> None:
    assert decode("F64", np.array([1.5, -1e-3, 1e30]).view(np.uint8)).tolist() == [1.5, np.float32(-1e-3), np.float32(1e30)]
    half = np.array([0.5], np.float16).tobytes()
    signs = decode("Q1_0", half + bytes([0b10000110, 0, 255]) + bytes(13))
    assert (signs[:24] * 2).tolist() == [-1, 1, 1, -1, -1, -1, -1, 1] + [-1] * 8 + [1] * 8
    codes = decode("Q2_0", half + bytes([0b11100100, 0b00000011]) + bytes(14))
    assert (codes[:8] * 2).tolist() == [-1, 0, 1, 2, 2, -1, -1, -1]
