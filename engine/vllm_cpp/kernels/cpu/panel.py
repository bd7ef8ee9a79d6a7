"""A few rows times a panel: the product both halves of attention are made of.

Owns `c[r] = c[r] * factor[r] + a[r] . B` for f32 rows a, c and a panel B [k][columns] of f16, f32 or int8 with scales (`kv_cache.py`). Each
value is one chain of fused multiply-adds over k in rising order, so its bits do not depend on how many rows or columns are computed
together; a number of B is made f32 exactly before it is multiplied. Must not know what rows and panel mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from llvmlite import ir
from numba.core import cgutils

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.kv_cache import GROUP
from vllm_cpp.kernels.simd import f32, f32x16, i8x16, i64, u16, u16x16
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
    scales: Value  # of an int8 panel

    def at(self, row: Value, column: Value | int, of: _Panel) -> _Operands:
        return self._replace(
            a=self.a + self.a_stride * row,
            b=self.b + column * of.item_bytes,
            ahead=simd.select(row == 0, self.ahead, self.b) + column * of.item_bytes,
            c=self.c + self.c_stride * row + column * 4,
            factors=simd.select(self.factors == 0, self.factors, self.factors + row * 4),
            scales=self.scales + of.scale_offset(column),
        )


class _Panel(Protocol):
    """How numbers lie in a panel."""

    item_bytes: int

    def scale_offset(self, column: Value | int) -> Value | int:
        """Where the scales of that column (a multiple of 16) stand."""

    def walk(self, of: _Operands, vectors: int, add: Callable[[Value, list[Value]], None]) -> None:
        """Call `add(i, columns)` for every row i of the panel, its first 16 * `vectors` columns as f32."""


class _Floats:
    """f16 or f32."""

    def __init__(self, load: Callable[..., Value], item_bytes: int):
        self.load = load
        self.item_bytes = item_bytes

    def scale_offset(self, column: Value | int) -> int:  # noqa: ARG002 - no scales
        return 0

    def walk(self, of: _Operands, vectors: int, add: Callable[[Value, list[Value]], None]) -> None:
        with cgutils.for_range(builder(), of.k.ir) as loop:
            i = Value(i64, loop.index)
            add(i, [self.load(f32x16, of.b + of.b_stride * i + self.item_bytes * LANES * v) for v in range(vectors)])


def _bytes(of: _Operands, i: Value, scales: list[Value]) -> list[Value]:
    """Int8 numbers times their scales: 8 bits times 11 are exact in f32."""
    return [simd.convert(f32x16, simd.load(i8x16, of.b + of.b_stride * i + LANES * v)) * scale for v, scale in enumerate(scales)]


class _KeyBytes:
    """int8; each run of 32 rows has a row of scales, one a column."""

    item_bytes = 1

    def scale_offset(self, column: Value | int) -> Value | int:
        return column * 2

    def walk(self, of: _Operands, vectors: int, add: Callable[[Value, list[Value]], None]) -> None:
        with cgutils.for_range(builder(), ((of.k + (GROUP - 1)) >> 5).ir) as groups:
            group = Value(i64, groups.index)
            here = of.scales + of.b_stride * 2 * group
            scales = [simd.half_to_float(simd.load(u16x16, here + 2 * LANES * v)) for v in range(vectors)]
            first = group << 5
            with cgutils.for_range(builder(), simd.minimum(of.k - first, GROUP).ir) as rows:
                i = first + Value(i64, rows.index)
                add(i, _bytes(of, i, scales))


class _ValueBytes:
    """int8; each row has its scales behind the panel, one for each run of 32 columns."""

    item_bytes = 1

    def scale_offset(self, column: Value | int) -> Value | int:
        return (column >> 5) * 2

    def walk(self, of: _Operands, vectors: int, add: Callable[[Value, list[Value]], None]) -> None:
        stride = ((of.b_stride + (GROUP - 1)) >> 5) * 2
        with cgutils.for_range(builder(), of.k.ir) as loop:
            i = Value(i64, loop.index)
            # Repeated before it is converted: a lone f16 is loaded into part of a register, and waits for who used the rest of it.
            scale = simd.half_to_float(simd.splat(u16x16, simd.load(u16, of.scales + stride * i)))
            add(i, _bytes(of, i, [scale] * vectors))


def _sums(of: _Operands, rows: int, vectors: int, panel: _Panel) -> None:
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

    def add(i: Value, columns: list[Value]) -> None:
        for line in range(0, panel.item_bytes * LANES * vectors, 64):
            simd.prefetch(of.ahead + of.b_stride * i + line)
        values = [simd.splat(f32x16, simd.load(f32, of.a + of.a_stride * r + i * 4)) for r in range(rows)]
        for r, v, cell in cells:
            make.store(simd.fma(values[r], columns[v], Value(f32x16, make.load(cell))).ir, cell)

    panel.walk(of, vectors, add)
    for r, v, cell in cells:
        simd.store(of.c + of.c_stride * r + 4 * LANES * v, Value(f32x16, make.load(cell)))


def _some_rows(of: _Operands, columns: Value, rows: int, panel: _Panel) -> None:
    """`rows` rows times all columns, cut into what the registers hold."""

    def cut(of: _Operands, vectors: int) -> None:
        rows_at_once, vectors_at_once = simd.sums_at_once(rows, vectors)
        for r in range(0, rows, rows_at_once):
            for v in range(0, vectors, vectors_at_once):
                _sums(of.at(constant(i64, r), LANES * v, panel), rows_at_once, vectors_at_once, panel)

    with cgutils.for_range(builder(), (columns >> 5).ir) as loop:
        cut(of.at(constant(i64, 0), Value(i64, loop.index) << 5, panel), 2)
    with builder().if_then((columns & LANES != 0).ir):
        cut(of.at(constant(i64, 0), columns - LANES, panel), 1)


def _product(panel: _Panel) -> Callable[..., None]:
    """The product over such panels: eight rows at a time, then four, two and one."""

    def product(rows: Value, columns: Value, *operands: Value) -> None:
        of = _Operands(*operands)
        with cgutils.for_range(builder(), (rows >> 3).ir) as loop:
            _some_rows(of.at(Value(i64, loop.index) << 3, 0, panel), columns, 8, panel)
        done = rows & -8
        for size in (4, 2, 1):
            with builder().if_then((rows & size != 0).ir):
                _some_rows(of.at(done, 0, panel), columns, size, panel)
            done = done + (rows & size)

    return unrolled(product)


_over_f16, _over_f32 = _product(_Floats(simd.load_half, 2)), _product(_Floats(simd.load, 4))
_over_key_bytes, _over_value_bytes = _product(_KeyBytes()), _product(_ValueBytes())


@jit.function(12)
def product_f16(a, a_stride, rows, b, b_stride, k, c, c_stride, columns, factors, ahead, scales):  # type: ignore[no-untyped-def]
    """f32 rows `a` times the f16 panel b [k][columns], to the f32 rows `c`. Strides are bytes between rows; `columns` is a multiple of
    16; `factors` is the address of one f32 a row, or 0: the sums start at zero. `ahead` is the panel needed next, or b again. `scales` is
    where those of int8 panels stand."""
    _over_f16(rows, columns, a, a_stride, b, b_stride, k, c, c_stride, factors, ahead, scales)


@jit.function(12)
def product_f32(a, a_stride, rows, b, b_stride, k, c, c_stride, columns, factors, ahead, scales):  # type: ignore[no-untyped-def]
    """The same over an f32 panel."""
    _over_f32(rows, columns, a, a_stride, b, b_stride, k, c, c_stride, factors, ahead, scales)


@jit.function(12)
def product_key_bytes(a, a_stride, rows, b, b_stride, k, c, c_stride, columns, factors, ahead, scales):  # type: ignore[no-untyped-def]
    """The same over a q8_0 panel of keys."""
    _over_key_bytes(rows, columns, a, a_stride, b, b_stride, k, c, c_stride, factors, ahead, scales)


@jit.function(12)
def product_value_bytes(a, a_stride, rows, b, b_stride, k, c, c_stride, columns, factors, ahead, scales):  # type: ignore[no-untyped-def]
    """The same over a q8_0 panel of values."""
    _over_value_bytes(rows, columns, a, a_stride, b, b_stride, k, c, c_stride, factors, ahead, scales)


# By KV dtype: the products over keys and over values.
PRODUCTS = {
    "f16": (product_f16, product_f16),
    "f32": (product_f32, product_f32),
    "q8_0": (product_key_bytes, product_value_bytes),
}


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
