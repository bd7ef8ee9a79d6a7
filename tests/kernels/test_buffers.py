"""Buffers: zeroed, aligned, of any size, and given back with the last array on them."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm_cpp.kernels.buffers import ALIGNMENT, aligned_zeros


@pytest.mark.parametrize("n_bytes", [1, 100, (128 << 10) - 1, 128 << 10, (4 << 20) + 3])
def test_buffers_are_zeroed_aligned_and_writable(n_bytes: int) -> None:
    array = aligned_zeros(n_bytes, np.uint8)
    assert array.shape == (n_bytes,)
    assert array.ctypes.data % ALIGNMENT == 0
    assert not array.any()
    array[:] = 7
    assert (array == 7).all()


def test_shapes_and_types() -> None:
    array = aligned_zeros((3, 50_000), np.float32)
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((3, 50_000), np.float32, True)
    part = array[2, 10:]
    del array
    gc.collect()
    part[:] = 1.5  # the memory lives as long as anything that shows it
    assert part.sum() == 1.5 * len(part)


def test_a_large_buffer_goes_back_to_the_system() -> None:
    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    aligned_zeros(64 << 20, np.uint8)[:] = 1
    before = resident()
    array = aligned_zeros(64 << 20, np.uint8)
    array[:] = 1
    assert resident() - before > 60 << 20
    del array
    assert resident() - before < 4 << 20


def test_what_cannot_be_had_is_no_memory() -> None:
    for count in (sys.maxsize, 1 << 60):
        with pytest.raises(MemoryError):
            aligned_zeros(count, np.int64)
