"""Rows with their blocks in another order, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
from vllm_cpp.kernels.cpu import rearrange
from vllm_cpp.kernels.records import pack


@pytest.mark.parametrize("width", [1, 3, 16, 50])
@pytest.mark.parametrize("nth", [1, 4])
def test_blocks_go_where_the_table_says(width, nth):
    x = np.random.default_rng(1).standard_normal((3, 5 * width + 2)).astype(np.float32)
    out = np.full((3, 4 * width + 1), np.nan, np.float32)
    source, count = np.array([4, 0, 0, 2], np.int32), np.array([2], np.int64)
    record = pack(
        rearrange.REARRANGE_FIELDS, count=address(count), x=address(x), x_stride=x.strides[0], out=address(out), out_stride=out.strides[0],
        width=width, source=address(source), n_blocks=4,
    )  # fmt: skip
    run([rearrange.rearrange], record, nth)
    blocks = x[:2, : 5 * width].reshape(2, 5, width)
    assert np.array_equal(out[:2, : 4 * width], blocks[:, source].reshape(2, -1))
    assert np.isnan(out[2]).all()
    assert np.isnan(out[:, -1]).all()
