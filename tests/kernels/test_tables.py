"""Points looked up by every way this CPU has are the table's, each value by its own bit."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from vllm_cpp.kernels import tables
from vllm_cpp.kernels.simd import load, store, u8x32, u16, unrolled
from vllm_cpp.kernels.vectors import VecType


@pytest.mark.parametrize("most_chunks", [tables.MOST_CHUNKS, 0], ids=["as the CPU likes", "loaded"])
@pytest.mark.parametrize(("n", "width", "n_values"), [(256, 8, 3), (512, 8, 4), (256, 4, 8), (512, 4, 5)])
def test_points_are_the_tables(n, width, n_values, most_chunks, monkeypatch):
    monkeypatch.setattr(tables, "MOST_CHUNKS", most_chunks)
    rng = np.random.default_rng(n + width)
    values = rng.choice(np.arange(100), n_values, replace=False)
    table = rng.choice(values, (n, width))
    points = tables.Points(table, lambda value: 200 - value)
    indices = VecType(u16, 256 // width)

    @unrolled
    def look_up(index, bits, out):
        for j, found in enumerate(points.look_up(load(indices, index), load(u8x32, bits))):
            store(out + 64 * j, found)

    @njit
    def kernel(index, bits, out):
        look_up(index, bits, out)

    every = rng.permutation(n).astype(np.uint16)
    for index in every.reshape(-1, 256 // width):
        bits, out = rng.integers(0, 256, 32, np.uint8), np.zeros(256, np.uint8)
        kernel(index.ctypes.data, bits.ctypes.data, out.ctypes.data)
        found, set_ = table[index].reshape(-1), np.unpackbits(bits, bitorder="little")
        np.testing.assert_array_equal(out, np.where(set_, 200 - found, found))
