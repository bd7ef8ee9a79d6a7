"""F64: doubles, rounded to f32 as they are read: what they are multiplied with is no finer."""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import floats
from vllm_cpp.kernels.simd import convert, f32, f32x16, f64, f64x16, fma, load, unrolled
from vllm_cpp.kernels.vectors import Value

WEIGHT_BYTES, ACT_BYTES, SPAN = 8, 4, 32


@unrolled
def load_weight(w: Value) -> Value:
    return convert(f32, load(f64, w))


@unrolled
def load_act(act: Value) -> Value:
    return load(f32, act)


FORM = floats.Form(
    WEIGHT_BYTES,
    ACT_BYTES,
    SPAN,
    load_weights=lambda w: convert(f32x16, load(f64x16, w)),
    load_acts=lambda act: load(f32x16, act),
    multiply=fma,
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
