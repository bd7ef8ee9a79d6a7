"""F32: plain floats."""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import floats
from vllm_cpp.kernels.simd import f32, load, unrolled
from vllm_cpp.kernels.vectors import Value

WEIGHT_BYTES, ACT_BYTES = 4, 4


@unrolled
def load_weight(w: Value) -> Value:
    return load(f32, w)


@unrolled
def load_act(act: Value) -> Value:
    return load(f32, act)


FORM = floats.Form(WEIGHT_BYTES, ACT_BYTES, lambda w: load(floats.SUMS, w), lambda act: load(floats.SUMS, act), load_weight, load_act)
SPAN = FORM.span
dots, rests, cell_dots, cell_rests = floats.dots(FORM), floats.rests(FORM), floats.cell_dots(FORM), floats.cell_rests(FORM)


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    floats.rows(dots, rests, SPAN, WEIGHT_BYTES, ACT_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, _scratch):  # type: ignore[no-untyped-def]
    floats.tile(cell_dots, cell_rests, SPAN, WEIGHT_BYTES, w, stride, n_rows, k, acts, n_acts, outs)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    floats.decode(load_weight, WEIGHT_BYTES, w, k, out)
