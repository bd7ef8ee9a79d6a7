"""A few rows times a panel: the product both halves of attention are made of.

Owns `c[r] = c[r] * factor[r] + a[r] . B` for f32 rows a, c and a panel B [k][columns] of f16 or f32. Each value is one chain of fused
multiply-adds over k in rising order, so its bits do not depend on how many rows or columns are computed together. Must not know what rows
and panel mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.simd import f32, f32x16, i64
from vllm_cpp.kernels.vectors import Value, builder, coerce, constant, llvm_type, unrolled

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
    ahead: Value  # the panel needed next, laid out like b: asked for line by line

    def at(self, row: Value, column: Value | int, itemsize: int) -> _Operands:
        return self._replace(
            a=self.a + self.a_stride * row,
            b=self.b + column * itemsize,
            ahead=simd.select(row == 0, self.ahead, self.b) + column * itemsize,
            c=self.c + self.c_stride * row + column * 4,
            factors=simd.select(self.factors == 0, self.factors, self.factors + row * 4),
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
        for line in range(0, itemsize * LANES * vectors, 64):
            simd.prefetch(of.ahead + of.b_stride * i + line)
        columns = [load(f32x16, of.b + of.b_stride * i + itemsize * LANES * v) for v in range(vectors)]
        values = [simd.splat(f32x16, simd.load(f32, of.a + of.a_stride * r + i * 4)) for r in range(rows)]
        for r, v, cell in cells:
            make.store(simd.fma(values[r], columns[v], Value(f32x16, make.load(cell))).ir, cell)
    for r, v, cell in cells:
        simd.store(of.c + of.c_stride * r + 4 * LANES * v, Value(f32x16, make.load(cell)))


def _panel(of: _Operands, columns: Value, rows: int, load: Callable[..., Value], itemsize: int) -> None:
    """`rows` rows times all columns, cut into what the registers hold."""

    def cut(of: _Operands, vectors: int) -> None:
        rows_at_once, vectors_at_once = simd.sums_at_once(rows, vectors)
        for r in range(0, rows, rows_at_once):
            for v in range(0, vectors, vectors_at_once):
                _sums(of.at(constant(i64, r), LANES * v, itemsize), rows_at_once, vectors_at_once, load, itemsize)

    with cgutils.for_range(builder(), (columns >> 5).ir) as loop:
        cut(of.at(constant(i64, 0), Value(i64, loop.index) << 5, itemsize), 2)
    with builder().if_then((columns & LANES != 0).ir):
        cut(of.at(constant(i64, 0), columns - LANES, itemsize), 1)


def _product(of: _Operands, rows: Value, columns: Value, load: Callable[..., Value], itemsize: int) -> None:
    """Eight rows at a time, then four, two and one."""
    with cgutils.for_range(builder(), (rows >> 3).ir) as loop:
        _panel(of.at(Value(i64, loop.index) << 3, 0, itemsize), columns, 8, load, itemsize)
    done = rows & -8
    for size in (4, 2, 1):
        with builder().if_then((rows & size != 0).ir):
            _panel(of.at(done, 0, itemsize), columns, size, load, itemsize)
        done = done + (rows & size)


@unrolled
def _over_f16(rows: Value, columns: Value, *operands: Value) -> None:
    _product(_Operands(*operands), rows, columns, simd.load_half, 2)


@unrolled
def _over_f32(rows: Value, columns: Value, *operands: Value) -> None:
    _product(_Operands(*operands), rows, columns, simd.load, 4)


@jit.function(11)
def product_f16(a, a_stride, rows, b, b_stride, k, c, c_stride, columns, factors, ahead):  # type: ignore[no-untyped-def]
    """f32 rows `a` times the f16 panel b [k][columns], to the f32 rows `c`. Strides are bytes between rows; `columns` is a multiple of
    16; `factors` is the address of one f32 a row, or 0: the sums start at zero. `ahead` is the panel needed next, or b again."""
    _over_f16(rows, columns, a, a_stride, b, b_stride, k, c, c_stride, factors, ahead)


@jit.function(11)
def product_f32(a, a_stride, rows, b, b_stride, k, c, c_stride, columns, factors, ahead):  # type: ignore[no-untyped-def]
    """The same over an f32 panel."""
    _over_f32(rows, columns, a, a_stride, b, b_stride, k, c, c_stride, factors, ahead)


@unrolled
def call_product(product: Value, *args: Value) -> None:
    """Call one of the products by its address."""
    i64_type = llvm_type(i64)
    kind = ir.FunctionType(ir.VoidType(), [i64_type] * len(args))
    builder().call(builder().inttoptr(product.ir, kind.as_pointer()), [coerce(arg, i64).ir for arg in args])


@unrolled
def padded_rows(n: Value) -> Value:
    """Rows a product of n rows is best given: one, two or four rows beside the eights are computed as such, others filled up."""
    odd = n & 7
    return n + simd.select(odd == 3, 1, simd.select(odd > 4, 8 - odd, 0 * odd))
