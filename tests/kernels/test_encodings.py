"""Every encoding's three kernels, one table: decode is exact, rows agree with the naive float64 product, a tile is rows bit for bit."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from tests.kernels.encodings import activation, product, run_rows, run_tile, weights
from tests.reference.decoders import decode
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.kernels.cpu.registry import NAMES, encoding_kernels
from vllm_cpp.quants import ENCODINGS

# Numbers of values a row: whole quads and blocks, one block, three, a quad and a bit; floats also what fills no vector.
SIZES = {1: (1, 31, 100, 576), 32: (32, 96, 128, 160, 576), 64: (64, 128, 320), 128: (128, 384), 256: (256, 768)}


def kernels_of(encoding):
    return importlib.import_module(f"vllm_cpp.kernels.cpu.encodings.{encoding.lower()}")


def case(encoding, n_rows, k, n_acts, *, gap=0, seed=1):
    """Weight rows `gap` bytes apart at an odd address, and activation rows of very different sizes."""
    rng = np.random.default_rng(seed)
    rows = weights(encoding, n_rows, k, rng)
    memory = np.full((n_rows, rows.shape[1] + gap), 255, np.uint8)
    memory[:, : rows.shape[1]] = rows
    shifted = np.concatenate([np.zeros(3, np.uint8), memory.reshape(-1)])[3:]
    acts = [activation(encoding, (rng.standard_normal(k) * 10.0 ** rng.integers(-2, 3)).astype(np.float32)) for _ in range(n_acts)]
    return rows, shifted, rows.shape[1] + gap, acts


@pytest.mark.parametrize("encoding", NAMES)
def test_decode_is_exact(encoding):
    for k in SIZES[ENCODINGS[encoding].block_values]:
        rows, memory, _, _ = case(encoding, 1, k, 0)
        out = np.full(k + 1, 7, np.float32)
        kernels_of(encoding).decode(memory.ctypes.data, k, out.ctypes.data)
        np.testing.assert_array_equal(out[:k], decode(encoding, rows[0]))
        assert out[k] == 7


@pytest.mark.parametrize(("encoding", "n_scales", "last"), [("MXFP4", 1, 252), ("NVFP4", 4, 255)])
def test_every_scale_byte_decodes(encoding, n_scales, last):
    """Up to the last one whose values are finite."""
    rows = weights(encoding, last + 1, ENCODINGS[encoding].block_values, np.random.default_rng(2))
    rows[:, :n_scales] = np.arange(last + 1)[:, None]
    out = np.zeros(len(rows) * ENCODINGS[encoding].block_values, np.float32)
    kernels_of(encoding).decode(rows.ctypes.data, out.size, out.ctypes.data)
    np.testing.assert_array_equal(out, decode(encoding, rows))


@pytest.mark.parametrize("encoding", NAMES)
def test_rows_agree_with_the_naive_product(encoding):
    for k in SIZES[ENCODINGS[encoding].block_values]:
        rows, memory, stride, acts = case(encoding, 5, k, 3, gap=7)
        for act in acts:
            expected, size = product(encoding, rows, act)
            out = run_rows(kernels_of(encoding), memory.ctypes.data, stride, 5, k, act)
            assert (np.abs(out - expected) <= 1e-6 * size).all()


@pytest.mark.parametrize("encoding", NAMES)
def test_a_tile_is_rows_bit_for_bit(encoding):
    kernels = kernels_of(encoding)
    sizes = SIZES[ENCODINGS[encoding].block_values]
    shapes = [(37, sizes[-1], n_acts) for n_acts in range(1, 10)] + [(n_rows, sizes[0], 2) for n_rows in (1, 15, 16, 32, 33)]
    for n_rows, k, n_acts in [*shapes, *((3, k, 5) for k in sizes[1:-1])]:
        _, memory, stride, acts = case(encoding, n_rows, k, n_acts, gap=2)
        out = run_tile(kernels, memory.ctypes.data, stride, n_rows, k, acts)
        one_by_one = [run_rows(kernels, memory.ctypes.data, stride, n_rows, k, act) for act in acts]
        np.testing.assert_array_equal(out, one_by_one, f"{n_rows} rows of {k}, {n_acts} activation rows")


@pytest.mark.parametrize("encoding", NAMES)
def test_the_same_row_has_the_same_bits_wherever_it_stands(encoding):
    """A row and an activation row repeated: every product is the same."""
    k = SIZES[ENCODINGS[encoding].block_values][-1]
    rows, _, _, acts = case(encoding, 1, k, 1)
    memory = np.repeat(rows, 49, 0)
    out = run_tile(kernels_of(encoding), memory.ctypes.data, rows.shape[1], 49, k, acts * 6)
    assert len(np.unique(out)) == 1


def test_registry_gives_the_addresses_of_an_encoding():
    kernels = encoding_kernels("Q4_1")
    module = kernels_of("Q4_1")
    assert (kernels.rows_address, kernels.tile_address, kernels.decode_address) == (
        module.rows.address,
        module.tile.address,
        module.decode.address,
    )


def test_an_encoding_without_kernels_is_refused_by_name():
    with pytest.raises(ModelLoadError, match=r"encoding Q8_1 has no CPU kernels.*Q4_K"):
        encoding_kernels("Q8_1")
