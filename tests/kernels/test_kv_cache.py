"""The KV layout: sizes, and what it refuses."""

from __future__ import annotations

import pytest

from vllm_cpp.kernels.cpu.kv_cache import KvLayout


@pytest.mark.parametrize(("d", "dtype", "itemsize", "row"), [(64, "f16", 2, 64), (40, "f16", 2, 48), (128, "f32", 4, 128)])
def test_buffers(d, dtype, itemsize, row):
    layout = KvLayout(3, d, 32, dtype)
    k, v = layout.allocate(5)
    assert k.shape == (5, 3, d, 32)
    assert v.shape == (5, 3, 32, row)
    assert layout.itemsize == k.itemsize == v.itemsize == itemsize
    assert 5 * layout.block_bytes == k.nbytes + v.nbytes
    assert not k.any()
    assert k.ctypes.data % 64 == v.ctypes.data % 64 == 0


@pytest.mark.parametrize(
    ("block_size", "dtype", "said"), [(24, "f16", "block_size is 24"), (0, "f16", "block_size is 0"), (32, "q8_0", "KV dtype is 'q8_0'")]
)
def test_refusals(block_size, dtype, said):
    with pytest.raises(ValueError, match=said):
        KvLayout(2, 64, block_size, dtype)
