"""Gates: rows of heads multiplied by an activation of one number a value, or of one a head; and a soft cap on values.

Owns which activations there are. Must not know what rows and gates mean.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.elementwise import sigmoid, silu, span
from vllm_cpp.kernels.cpu.fields import field, number, share
from vllm_cpp.kernels.simd import f32, f32x16
from vllm_cpp.kernels.vectors import Value, unrolled

LANES = 16

SIGMOID, SOFTPLUS, SILU = range(3)  # `kind`

GATE_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride",  # f32[rows, n_heads, length], multiplied in place; bytes between two rows
    "n_heads", "length",
    "gate", "gate_stride", "gate_head_stride",  # f32; bytes between the gates of two rows, of two heads
    "each",  # flag: a gate for each value of a head; else one a head
    "kind",
)  # fmt: skip
SOFT_CAP_FIELDS = (
    "count",  # address of the int64 number of rows
    "first_row",  # address of the int64 that holds the address of the first f32 row
    "stride", "width",  # bytes between two rows; values of a row
    "cap",  # float
)  # fmt: skip
_S_COUNT, _S_FIRST_ROW, _S_STRIDE, _S_WIDTH, _S_CAP = range(len(SOFT_CAP_FIELDS))

_COUNT, _X, _X_STRIDE, _N_HEADS, _LENGTH, _GATE, _GATE_STRIDE, _GATE_HEAD_STRIDE, _EACH, _KIND = range(len(GATE_FIELDS))


@unrolled
def _activated(x: Value, kind: Value) -> Value:
    return simd.select(kind == SIGMOID, sigmoid(x), simd.select(kind == SOFTPLUS, simd.softplus(x), silu(x)))


@jit.op
def gate(args, tid, nth):  # type: ignore[no-untyped-def]
    """x *= activation(gate). Shared out by (row, head)."""
    n_heads, length, kind = field(args, _N_HEADS), field(args, _LENGTH), field(args, _KIND)
    whole = length & -LANES
    units = field(field(args, _COUNT), 0) * n_heads
    for unit in range(share(units, 1, tid, nth), share(units, 1, tid + 1, nth)):
        row, head = unit // n_heads, unit % n_heads
        x = field(args, _X) + row * field(args, _X_STRIDE) + 4 * length * head
        by = field(args, _GATE) + row * field(args, _GATE_STRIDE) + field(args, _GATE_HEAD_STRIDE) * head
        if field(args, _EACH) == 0:
            factor = _activated(simd.load(f32, by), kind)
            for i in range(0, whole, LANES):
                simd.store(x + 4 * i, simd.load(f32x16, x + 4 * i) * factor)
            for i in range(whole, length):
                simd.store(x + 4 * i, simd.load(f32, x + 4 * i) * factor)
            continue
        for i in range(0, whole, LANES):
            simd.store(x + 4 * i, simd.load(f32x16, x + 4 * i) * _activated(simd.load(f32x16, by + 4 * i), kind))
        for i in range(whole, length):
            simd.store(x + 4 * i, simd.load(f32, x + 4 * i) * _activated(simd.load(f32, by + 4 * i), kind))


@unrolled
def _capped(x: Value, cap: Value) -> Value:
    """cap * tanh(x / cap)."""
    return (sigmoid(x / cap * 2.0) * 2.0 - 1.0) * cap


@jit.op
def soft_cap(args, tid, nth):  # type: ignore[no-untyped-def]
    """Values brought softly below a cap, in place: cap * tanh(value / cap)."""
    width, cap = field(args, _S_WIDTH), number(args, _S_CAP)
    vectors = field(field(args, _S_COUNT), 0) * ((width + LANES - 1) // LANES)
    at, last = share(vectors, 1, tid, nth), share(vectors, 1, tid + 1, nth)
    while at < last:
        row, column, n, at = span(at, last, width)
        x = field(field(args, _S_FIRST_ROW), 0) + row * field(args, _S_STRIDE) + 4 * column
        whole = n & -LANES
        for i in range(0, whole, LANES):
            simd.store(x + 4 * i, _capped(simd.load(f32x16, x + 4 * i), cap))
        for i in range(whole, n):
            simd.store(x + 4 * i, _capped(simd.load(f32, x + 4 * i), cap))
