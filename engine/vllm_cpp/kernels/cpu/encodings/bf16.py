"""BF16: the upper half of an f32; activations are rounded to it too, as CPUs that multiply bf16 want them."""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import floats
from vllm_cpp.kernels.simd import dot_bfloat, f32, load, load_bfloat, u16x32, unrolled
from vllm_cpp.kernels.vectors import Value

WEIGHT_BYTES, ACT_BYTES, SPAN = 2, 2, 64


@unrolled
def load_weight(w: Value) -> Value:
    return load_bfloat(f32, w)


@unrolled
def load_act(act: Value) -> Value:
    return load_bfloat(f32, act)


FORM = floats.Form(
    WEIGHT_BYTES,
    ACT_BYTES,
    SPAN,
    load_weights=lambda w: load(u16x32, w),
    load_acts=lambda act: load(u16x32, act),
    multiply=lambda w, act, sums: dot_bfloat(sums, w, act),
    load_weight=load_weight,
    load_act=load_act,
)
dot, dot_cells, rest_cells = floats.dot(FORM), floats.dot_cells(FORM), floats.rest_cells(FORM)


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    floats.rows(dot, load_weight, load_act, SPAN, WEIGHT_BYTES, ACT_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, _scratch):  # type: ignore[no-untyped-def]
    floats.tile(dot_cells, rest_cells, SPAN, WEIGHT_BYTES, w, stride, n_rows, k, acts, n_acts, outs)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    floats.decode(load_weight, WEIGHT_BYTES, w, k, out)
