"""BF16: the upper half of an f32; activations are rounded to it too, as CPUs that multiply bf16 want them. Where the CPU does not, what is
rounded stays f32."""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import floats
from vllm_cpp.kernels.simd import dot_bfloat, f32, load, load_bfloat, multiplies_bfloats, u16, unrolled
from vllm_cpp.kernels.vectors import Value, VecType

WEIGHT_BYTES = 2
MULTIPLIES_PAIRS = multiplies_bfloats()
ACT_BYTES = 2 if MULTIPLIES_PAIRS else 4
PAIRS = VecType(u16, 2 * floats.LANES)


@unrolled
def load_weight(w: Value) -> Value:
    return load_bfloat(f32, w)


@unrolled
def load_act(act: Value) -> Value:
    return load_bfloat(f32, act) if MULTIPLIES_PAIRS else load(f32, act)


def _form() -> floats.Form:
    if MULTIPLIES_PAIRS:
        return floats.Form(
            WEIGHT_BYTES, ACT_BYTES, lambda w: load(PAIRS, w), lambda act: load(PAIRS, act), load_weight, load_act,
            step=PAIRS.lanes, multiply=lambda w, act, sums: dot_bfloat(sums, w, act),
        )  # fmt: skip
    return floats.Form(
        WEIGHT_BYTES, ACT_BYTES, lambda w: load_bfloat(floats.SUMS, w), lambda act: load(floats.SUMS, act), load_weight, load_act
    )


FORM = _form()
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
