"""A few rows times a panel: the product both halves of attention are made of.

Owns `c[r] = c[r] * factor[r] + a[r] . B` for f32 rows a, c and a panel B [k][columns] of f16 or f32. Each value is one chain of fused multiply-adds over
k in rising order, so its bits do not depend on how many rows or columns are computed together. Must not know what rows and panel mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core import cgutils

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.simd import f32, f32x16, i64
from vllm_cpp.kernels.vectors import Value, builder, constant, llvm_type, unrolled

LANES = 16


class _Operands(NamedTuple):
    """Addresses of the first row or column concerned, and bytes from a row to the next."""

    a: Value
    a_stride: Value
    b: Value
    b_stride: Value
    k: Value
    c: Value
    c_stride: Value
    factors: Value  # 0: c is not read, the sums start at zero

    def at(self, row: int, column: Value | int, itemsize: int) -> _Operands:
        return self._replace(
            a=self.a + self.a_stride * row,
            b=self.b + column * itemsize,
            c=self.c + self.c_stride * row + column * 4,
            factors=simd.select(self.factors == 0, self.factors, self.factors + 4 * row),
        )


def _sums(of: _Operands, rows: int, vectors: int, load: Callable[..., Value], itemsize: int) -> None:
    """`rows` rows times 16 * `vectors` columns, every sum in its own register."""
    make = builder()
    cells = [(r, v, cgutils.alloca_once(make, llvm_type(f32x16))) for r in range(rows) for v in range(vectors)]
    with make.if_else((of.factors == 0).ir) as (fresh, kept):
        with fresh:
            for _, _, cell in cells:
                make.store(constant(f32x16, 0).ir, cell)
        with kept:
            for r, v, cell in cells:
                make.store((simd.load(f32x16, of.c + of.c_stride * r + 4 * LANES * v) * simd.load(f32, of.factors + 4 * r)).ir, cell)
    with cgutils.for_range(make, of.k.ir) as loop:
        i = Value(i64, loop.index)
        columns = [load(f32x16, of.b + of.b_stride * i + itemsize * LANES * v) for v in range(vectors)]
        values = [simd.splat(f32x16, simd.load(f32, of.a + of.a_stride * r + i * 4)) for r in range(rows)]
        for r, v, cell in cells:
            make.store(simd.fma(values[r], columns[v], Value(f32x16, make.load(cell))).ir, cell)
    for r, v, cell in cells:
        simd.store(of.c + of.c_stride * r + 4 * LANES * v, Value(f32x16, make.load(cell)))


def _panel(rows: int, load: Callable[..., Value], itemsize: int) -> Callable[..., None]:
    """The product of `rows` rows and any multiple of 16 columns, cut into what the registers hold."""

    def cut(of: _Operands, vectors: int) -> None:
        rows_at_once, vectors_at_once = simd.sums_at_once(rows, vectors)
        for r in range(0, rows, rows_at_once):
            for v in range(0, vectors, vectors_at_once):
                _sums(of.at(r, LANES * v, itemsize), rows_at_once, vectors_at_once, load, itemsize)

    @unrolled
    def panel(a: Any, a_stride: Any, b: Any, b_stride: Any, k: Any, c: Any, c_stride: Any, columns: Any, factors: Any) -> None:
        of = _Operands(a, a_stride, b, b_stride, k, c, c_stride, factors)
        make = builder()
        with cgutils.for_range(make, (columns >> 5).ir) as loop:
            cut(of.at(0, Value(i64, loop.index) << 5, itemsize), 2)
        with make.if_then((columns & LANES != 0).ir):
            cut(of.at(0, columns - LANES, itemsize), 1)

    return panel


def _product(load: Callable[..., Value], itemsize: int) -> Any:
    eight, four, two, one = (_panel(rows, load, itemsize) for rows in (8, 4, 2, 1))

    @jit.helper
    def product(a, a_stride, n_rows, b, b_stride, k, c, c_stride, columns, factors):  # type: ignore[no-untyped-def]
        """`columns` is a multiple of 16; `factors` 0 starts the sums at zero, else it is the address of one f32 a row."""
        while n_rows >= 8:
            eight(a, a_stride, b, b_stride, k, c, c_stride, columns, factors)
            n_rows -= 8
            a += 8 * a_stride
            c += 8 * c_stride
            factors += 32 if factors != 0 else 0
        if n_rows >= 4:
            four(a, a_stride, b, b_stride, k, c, c_stride, columns, factors)
            n_rows -= 4
            a += 4 * a_stride
            c += 4 * c_stride
            factors += 16 if factors != 0 else 0
        if n_rows >= 2:
            two(a, a_stride, b, b_stride, k, c, c_stride, columns, factors)
            n_rows -= 2
            a += 2 * a_stride
            c += 2 * c_stride
            factors += 8 if factors != 0 else 0
        if n_rows >= 1:
            one(a, a_stride, b, b_stride, k, c, c_stride, columns, factors)

    return product


product_f16 = _product(simd.load_half, 2)
product_f32 = _product(simd.load, 4)


@jit.inner
def padded_rows(n):  # type: ignore[no-untyped-def]
    """Rows a product of n rows is best given: one or two odd rows are computed as such, more are filled up to the next size."""
    odd = n % 8
    if odd == 3:
        return n + 1
    return n + 8 - odd if odd >= 5 else n
