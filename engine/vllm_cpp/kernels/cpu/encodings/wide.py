"""Decoding of "a32" encodings whose blocks hold more than 32 values.

Owns the way from a quad's bytes to values in order. Must not know how any encoding packs its blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings.a32 import QUAD
from vllm_cpp.kernels.simd import convert, f32x16, i32x16, shuffle, splat, store, unrolled
from vllm_cpp.kernels.vectors import Value


def values(unpack: Callable[[Value], tuple[Value, Value, Value]], n_values: int, offset: int) -> Callable:
    """Decode one block of n_values to f32. `unpack(address)` gives a quad as `a32.Form.unpack` does, of which the block is the start; with
    eight scales, the last four belong to second halves."""

    def block_values(w: Value, out: Value) -> None:
        *halves, scales = unpack(w)
        for run in range(n_values // 16):
            b, half = divmod(run, 2)
            q = convert(f32x16, convert(i32x16, shuffle(halves[half], range(16 * b, 16 * b + 16))) - offset)
            store(out + 64 * run, q * splat(f32x16, scales[(b + QUAD * half) % scales.type.lanes]))

    return unrolled(block_values)


@jit.inner
def decode(block_values, n_values, block_bytes, w, k, out):  # type: ignore[no-untyped-def]
    """The decode kernel of these encodings (see `jit.decode_kernel`)."""
    for b in range(k // n_values):
        block_values(w + block_bytes * b, out + 4 * n_values * b)
