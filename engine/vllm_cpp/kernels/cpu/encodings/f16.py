"""F16: IEEE half precision; activations stay f32."""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import floats
from vllm_cpp.kernels.simd import f32, f32x16, fma, load, load_half, unrolled
from vllm_cpp.kernels.vectors import Value

WEIGHT_BYTES, ACT_BYTES, SPAN = 2, 4, 32


@unrolled
def load_weight(w: Value) -> Value:
    return load_half(f32, w)


@unrolled
def load_act(act: Value) -> Value:
    return load(f32, act)


FORM = floats.Form(
    WEIGHT_BYTES,
    ACT_BYTES,
    SPAN,
    load_weights=lambda w: load_half(f32x16, w),
    load_acts=lambda act: load(f32x16, act),
    multiply=fma,
    load_weight=load_weight,
    load_act=load_act,
)
dots, rests, dot_cells, rest_cells = floats.four_dots(FORM), floats.four_rests(FORM), floats.dot_cells(FORM), floats.rest_cells(FORM)


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    floats.rows_by_four(dots, rests, SPAN, WEIGHT_BYTES, ACT_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, _scratch):  # type: ignore[no-untyped-def]
    floats.tile(dot_cells, rest_cells, SPAN, WEIGHT_BYTES, w, stride, n_rows, k, acts, n_acts, outs)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    floats.decode(load_weight, WEIGHT_BYTES, w, k, out)
