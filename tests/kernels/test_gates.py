"""Gates a value and a head: within 1e-6 of the naive form, threads change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
from tests.reference.attention import gate as naive
from vllm_cpp.kernels.cpu import gates
from vllm_cpp.kernels.records import pack


@pytest.mark.parametrize("kind", ["sigmoid", "softplus", "silu"])
@pytest.mark.parametrize(("length", "each"), [(64, True), (40, True), (40, False), (8, False)])
def test_gate(kind, length, each):
    rng = np.random.default_rng(6)
    x = rng.standard_normal((9, 5 * length + 2)).astype(np.float32)
    by = rng.standard_normal((9, 6, 2 * length)).astype(np.float32) * 12  # heads of it stand apart, as where they lie between a query's
    by[0, 0, :2] = 95, -95
    count, outs = np.full(1, 9, np.int64), []
    for nth in (1, 2, 7):
        out = x.copy()
        record = pack(
            gates.GATE_FIELDS, count=address(count), x=address(out), x_stride=out.strides[0], n_heads=5, length=length, gate=address(by),
            gate_stride=by.strides[0], gate_head_stride=by.strides[1], each=each, kind=getattr(gates, kind.upper()),
        )  # fmt: skip
        run([gates.gate], record, nth)
        outs.append(out)
    expected = naive(x[:, : 5 * length].reshape(9, 5, length), by[:, :5, : length if each else 1], kind)
    assert np.abs(outs[0][:, : 5 * length].reshape(9, 5, length) - expected).max() <= 1e-6 * np.abs(expected).max()
    assert np.array_equal(outs[0][:, 5 * length :], x[:, 5 * length :])
    assert all(np.array_equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("cap", [30.0, 2.5])
def test_soft_cap(cap):
    x = np.random.default_rng(8).standard_normal((5, 75)).astype(np.float32) * 40
    x[0, :3] = 1e30, -1e30, 0
    count, outs = np.full(1, 5, np.int64), []
    for nth in (1, 3):
        out = x.copy()
        first_row = np.full(1, address(out), np.int64)
        record = pack(gates.SOFT_CAP_FIELDS, count=address(count), first_row=address(first_row), stride=x.strides[0], width=70, cap=cap)
        run([gates.soft_cap], record, nth)
        outs.append(out)
    assert np.abs(outs[0][:, :70] - cap * np.tanh(x[:, :70].astype(np.float64) / cap)).max() <= 3e-7 * cap
    assert np.array_equal(outs[0][:, 70:], x[:, 70:])
    assert np.array_equal(outs[1], outs[0])
