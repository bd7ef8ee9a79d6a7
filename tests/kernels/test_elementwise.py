"""Activations and additions: within 1e-6 of the naive form, and the same bits wherever in a row a value stands."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import address, run
from tests.reference import experts, ops
from vllm_cpp.kernels.cpu import elementwise
from vllm_cpp.kernels.records import pack


def close(found, expected):
    return np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


def activate(gate, up, out, width, nth=1, kind=elementwise.SILU, limit=np.inf):
    count = np.array([len(up)], np.int64)
    record = pack(
        elementwise.ACTIVATE_FIELDS,
        count=address(count), kind=kind, limit=float(limit), gate=address(gate), gate_stride=0 if gate is None else gate.strides[0],
        up=address(up), up_stride=up.strides[0], width=width, out=address(out), out_stride=out.strides[0],
    )  # fmt: skip
    run([elementwise.activate], record, nth)


KINDS = ["silu", "gelu", "squared relu", "shifted silu", "silu, then cut", "cut, then silu", "gelu alone"]  # by number


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("width", [1, 24, 160])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_activations(kind, width, nth):
    both = np.random.default_rng(3).standard_normal((5, 2 * width)).astype(np.float32) * 8  # gate and up side by side in one buffer
    out, activation = np.zeros((5, width), np.float32), elementwise.Activation(kind, 7.0)
    assert str(activation) == f"{KINDS[kind]} within 7"
    activate(both if activation.gated else None, both[:, width:], out, width, nth, kind, 7.0)
    assert close(out, experts.ACTIVATIONS[KINDS[kind]](both[:, :width].astype(np.float64), both[:, width:].astype(np.float64), 7.0))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_without_a_limit_nothing_is_cut(kind):
    gate, up = np.random.default_rng(5).standard_normal((2, 3, 40)).astype(np.float32) * 30
    out = np.zeros((3, 40), np.float32)
    activate(gate, up, out, 40, kind=kind)
    assert close(out, experts.ACTIVATIONS[KINDS[kind]](gate.astype(np.float64), up.astype(np.float64), np.inf))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_bits_do_not_depend_on_the_place_in_a_row(kind):
    gate, up = np.random.default_rng(4).standard_normal((2, 1, 53)).astype(np.float32) * 20
    whole, shifted = np.zeros((1, 53), np.float32), np.zeros((1, 53), np.float32)
    activate(gate, up, whole, 53, kind=kind, limit=5.0)
    for start in range(1, 20):
        activate(gate[:, start:], up[:, start:], shifted[:, start:], 53 - start, nth=3, kind=kind, limit=5.0)
        assert np.array_equal(shifted[:, start:], whole[:, start:])


def test_silu_at_the_ends_of_the_range():
    gate = np.array([[-200.0, -88.0, 0.0, 88.0, 200.0, np.inf, np.nan]], np.float32)
    out = np.zeros_like(gate)
    activate(gate, np.ones_like(gate), out, 7)
    assert np.abs(out[0, :2]).max() < 1e-30
    assert out[0, 2:6].tolist() == [0.0, 88.0, 200.0, np.inf]
    assert np.isnan(out[0, 6])


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_what_is_not_a_number_stays_so(kind):
    values = np.full((1, 17), np.nan, np.float32)
    out = np.zeros_like(values)
    activate(values, values, out, 17, kind=kind, limit=2.0)
    assert np.isnan(out).all()


@pytest.mark.parametrize("nth", [1, 3])
def test_add_rows_and_bias(nth):
    rng = np.random.default_rng(5)
    x, y, bias = (
        rng.standard_normal((4, 37)).astype(np.float32),
        rng.standard_normal((4, 40)).astype(np.float32),
        rng.standard_normal(37).astype(np.float32),
    )
    expected = (x + y[:, :37]) + bias
    for addend, stride in ((y, y.strides[0]), (bias, 0)):
        count = np.array([4], np.int64)
        record = pack(
            elementwise.ADD_FIELDS, count=address(count), x=address(x), x_stride=x.strides[0], width=37, y=address(addend), y_stride=stride,
            keep=1.0, factor=1.0,
        )  # fmt: skip
        run([elementwise.add], record, nth)
    assert np.array_equal(x, expected)


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize(("keep", "factor"), [(1.0, 0.25), (-2.5, 1.0), (0.5, 3.0), (3.0, None), (0.0, None)])
def test_rows_are_scaled_and_added(nth, keep, factor):
    """Without rows to add only the scaling is left; 0 clears, whatever stood there."""
    rng = np.random.default_rng(7)
    x, y = rng.standard_normal((2, 4, 37)).astype(np.float32)
    expected = np.float32(keep) * x + (0 if factor is None else np.float32(factor) * y)
    if keep == 0:
        x[1, 3] = np.nan
    count = np.array([4], np.int64)
    record = pack(
        elementwise.ADD_FIELDS, count=address(count), x=address(x), x_stride=x.strides[0], width=37, y=0 if factor is None else address(y),
        y_stride=y.strides[0], keep=keep, factor=factor or 0.0,
    )  # fmt: skip
    run([elementwise.add], record, nth)
    assert np.allclose(x, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("nth", [1, 2])
def test_gated_add(nth):
    rng = np.random.default_rng(6)
    x, y = rng.standard_normal((2, 3, 70)).astype(np.float32)
    gate = rng.standard_normal((3, 1)).astype(np.float32) * 4
    expected = x + ops.sigmoid(gate) * y
    count = np.array([3], np.int64)
    record = pack(
        elementwise.GATED_ADD_FIELDS,
        count=address(count), x=address(x), x_stride=x.strides[0], width=70, y=address(y), y_stride=y.strides[0], gate=address(gate),
        gate_stride=gate.strides[0],
    )  # fmt: skip
    run([elementwise.gated_add], record, nth)
    assert close(x, expected)
