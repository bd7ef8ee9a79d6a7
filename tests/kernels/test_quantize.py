"""Activation quantizers: the naive ones' bytes exactly, whatever the number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.encodings import NAIVE, quantize_record
from vllm_cpp.kernels.cpu.quantize import activation_row_bytes, quantize


def awkward_rows(n, k):
    """Rows of many sizes; some all zero, with ties for the largest value, with halves to round."""
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((n, k)) * 10.0 ** rng.integers(-6, 4, (n, 1))).astype(np.float32)
    x[0] = 0
    x[1, :32] = 0
    x[2] = np.round(x[2] / np.abs(x[2]).max() * 254) / 2
    x[3] = np.where(rng.random(k) < 0.5, -3.0, 3.0)
    return x


def used(layout, k):
    """Which bytes of a row are written: not those that fill its, or a record's, last cache line."""
    at = np.arange(activation_row_bytes(layout, k))
    return at % 192 < 176 if layout == "a32" else at < k + k // 16 * 2 + k // 256 * 4


@pytest.mark.parametrize(
    ("layout", "k"),
    [("bf16", 31), ("bf16", 576), ("a32", 32), ("a32", 96), ("a32", 128), ("a32", 160), ("a32", 1536), ("q8k", 256), ("q8k", 1024)],
)
def test_bytes_are_the_naive_quantizers(layout, k):
    x = awkward_rows(6, k)
    expected = np.stack([NAIVE[layout](row).raw for row in x])
    for nth in (1, 3):
        out = np.zeros((6, activation_row_bytes(layout, k)), np.uint8)
        if layout == "a32":
            out[:, used(layout, k)] = 255  # they are written whole
        record, _count = quantize_record(x, k, out, layout)
        for tid in range(nth):
            quantize(record.ctypes.data, tid, nth)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("layout", ["a32", "q8k"])
def test_only_the_counted_rows_are_written_and_strides_are_honoured(layout):
    x = np.full((3, 300), 9, np.float32)
    x[:, :256] = awkward_rows(4, 256)[1:]
    size = activation_row_bytes(layout, 256)
    out = np.full((3, size + 64), 77, np.uint8)
    record, count = quantize_record(x, 256, out, layout)
    count[0] = 2
    quantize(record.ctypes.data, 0, 1)
    assert (out[2] == 77).all()
    assert (out[:, size:] == 77).all()
    written = used(layout, 256)
    for row, values in zip(out[:2], x, strict=False):
        np.testing.assert_array_equal(row[:size][written], NAIVE[layout](np.ascontiguousarray(values[:256])).raw[written])
        assert (row[:size][~written] == 77).all()


def test_an_unknown_layout_is_refused_by_name():
    with pytest.raises(KeyError, match=r"no activation layout 'q9'"):
        activation_row_bytes("q9", 32)
