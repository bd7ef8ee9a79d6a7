"""Gates: rows of heads multiplied by an activation of one number a value, or of one a head.

Owns which activations there are. Must not know what rows and gates mean.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.elementwise import sigmoid, silu
from vllm_cpp.kernels.cpu.fields import field, share
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
