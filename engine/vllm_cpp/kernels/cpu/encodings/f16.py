"""F16: IEEE half precision."""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import floats
from vllm_cpp.kernels.simd import load_half

VALUE_BYTES = 2

dot, stage = floats.dot(load_half, VALUE_BYTES), floats.stage(load_half, VALUE_BYTES)


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    floats.rows(dot, load_half, VALUE_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    floats.tile(stage, load_half, VALUE_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    floats.decode(load_half, VALUE_BYTES, w, k, out)
