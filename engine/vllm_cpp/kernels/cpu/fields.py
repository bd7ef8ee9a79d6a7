"""Reading a record inside an operation, and sharing rows out to threads.

Owns how record words become values (see `records.pack`). Must not know what any operation does.
"""

from __future__ import annotations

from numba import types

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.vectors import Value, unrolled


@unrolled
def field(args: Value, i: Value) -> Value:
    """Word i of the record: an address, a count or a flag."""
    return simd.load(simd.i64, args + i * 8)


@unrolled
def number(args: Value, i: Value) -> Value:
    """Word i of the record as f32: records hold floats as float64."""
    return simd.convert(simd.f32, simd.load(types.float64, args + i * 8))


@unrolled
def index(address: Value, i: Value) -> Value:
    """Entry i of an i32 table, widened: counts and addresses are int64 in kernels."""
    return simd.convert(simd.i64, simd.load(simd.i32, address + i * 4))


@unrolled
def set_index(address: Value, i: Value, value: Value) -> None:
    simd.store(address + i * 4, simd.convert(simd.i32, value))


@jit.inner
def share(n, unit, tid, nth):  # type: ignore[no-untyped-def]
    """Where thread `tid`'s share of n rows starts (and thread tid - 1's ends): whole units, the rest to the last."""
    units = (n + unit - 1) // unit
    return min(n, units * tid // nth * unit)
