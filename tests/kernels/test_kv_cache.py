"""The KV layout: sizes, and what it refuses."""

from __future__ import annotations

import pytest

from vllm_cpp.kernels.cpu.kv_cache import KvLayout


@pytest.mark.parametrize(
    ("d", "dtype", "k_shape", "v_shape", "k_stride", "v_stride"),
    [
        (64, "f16", (64, 32), (32, 64), 64, 128),
        (40, "f16", (40, 32), (32, 48), 64, 96),
        (128, "f32", (128, 32), (32, 128), 128, 512),
        (64, "q8_0", (66 * 32 + 2 * 32,), (32 * 68,), 32, 64),
        (40, "q8_0", (40 * 32 + 2 * 32 * 2,), (32 * (48 + 2 * 2),), 32, 48),
    ],
)
def test_buffers(d, dtype, k_shape, v_shape, k_stride, v_stride):
    check(KvLayout(3, d, 32, dtype), k_shape, v_shape, k_stride, v_stride)


@pytest.mark.parametrize(
    ("dtype", "k_shape", "v_shape", "k_stride", "v_stride"),
    [
        ("f16", (40, 32), (32, 80), 64, 160),
        ("f32", (40, 32), (32, 80), 128, 320),
        ("q8_0", (40 * 32 + 2 * 32 * 2,), (32 * (80 + 2 * 3),), 32, 80),
    ],
)
def test_values_of_another_length(dtype, k_shape, v_shape, k_stride, v_stride):
    check(KvLayout(3, 40, 32, dtype, 72), k_shape, v_shape, k_stride, v_stride)


def check(layout, k_shape, v_shape, k_stride, v_stride):
    k, v = layout.allocate(5)
    assert k.shape == (3, 5, *k_shape)
    assert v.shape == (3, 5, *v_shape)
    assert (layout.k_bytes, layout.v_bytes) == (k[0, 0].nbytes, v[0, 0].nbytes)
    assert (layout.k_stride, layout.v_stride) == (k_stride, v_stride)
    assert 5 * layout.block_bytes == k.nbytes + v.nbytes
    assert not k.any()
    assert k.ctypes.data % 64 == v.ctypes.data % 64 == 0


@pytest.mark.parametrize(
    ("block_size", "dtype", "said"), [(24, "f16", "block_size is 24"), (0, "f16", "block_size is 0"), (32, "q4_0", "KV dtype is 'q4_0'")]
)
def test_refusals(block_size, dtype, said):
    with pytest.raises(ValueError, match=said):
        KvLayout(2, 64, block_size, dtype)
