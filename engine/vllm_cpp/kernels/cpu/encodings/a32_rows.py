"""Row products of encodings with 32-value blocks: four weight rows at once times one "a32" activation row.

Owns how the sums of `a32.py` are gathered: of a quad of each row, the sixteen blocks' sums stand in one vector, a block's four rows side by
side. Scales come in that order too, so nothing is moved before the chains end. Where sums of 16 bits must fit they are added and brought
side by side as such. Must not know how any encoding packs its blocks.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings.a32 import BLOCK, QUAD, RECORD, SCALES, SECOND, SUMS, SUMS_SCALED, Form, padded
from vllm_cpp.kernels.cpu.encodings.panel import ask_ahead, merged, side_by_side, store_lanes
from vllm_cpp.kernels.simd import (
    convert,
    dot_i16,
    dots,
    dots_at_once,
    f32x4,
    f32x16,
    fma,
    high,
    i8x64,
    i16x32,
    i32x4,
    i32x16,
    load,
    low,
    pair_sums,
    pinned,
    shuffle,
    unrolled,
    zero,
)
from vllm_cpp.kernels.vectors import Value, constant

ROWS_TOGETHER = 4


def dot(form: Form) -> Callable:
    """Totals + one quad of each of four weight rows times one record: two f32x16 of running sums, of the d parts and of the m parts; the
    chains of four rows stand side by side."""

    def quad_dot(
        total: Value, low_total: Value, w0: Value, w1: Value, w2: Value, w3: Value, reached: Value, act: Value
    ) -> tuple[Value, Value]:
        rows = (w0, w1, w2, w3)
        whole = integer_sums(form, rows, reached, [load(i8x64, act), load(i8x64, act + SECOND)])
        if form.dot_offset:
            whole = whole - for_each_row(load(i32x4, act + SUMS) * form.dot_offset)
        d, *m = scales_of(form, rows)
        total = fma(convert(f32x16, whole), d * for_each_row(load(f32x4, act + SCALES)), total)
        if form.minimum:
            low_total = fma(for_each_row(load(f32x4, act + SUMS_SCALED)), m[0], low_total)
        return total, low_total

    return unrolled(quad_dot)


def integer_sums(form: Form, rows: Sequence[Value], reached: Value, acts: Sequence[Value]) -> Value:
    """Each block's sum, i32x16: by block, then by row."""
    sums, in_16_bits = [], dots_at_once(form.largest)
    for r, w in enumerate(rows):
        ask_ahead(reached, ROWS_TOGETHER * form.quad_bytes, (r, ROWS_TOGETHER))
        pairs = list(zip(form.multiplied(w), acts, strict=True))
        if form.signed and not form.dot_offset and form.largest < 128:
            pairs = [(act, q) for q, act in pairs]  # of the first the size is taken, which four rows share
        if in_16_bits >= 2:
            sums.append(pinned(functools.reduce(operator.add, [pair_sums(q, act) for q, act in pairs])))
        else:
            sums.append(pinned(dots(zero(i32x16), pairs, form.largest)))
    if in_16_bits < 2:
        return side_by_side(sums)
    times = min(2, (in_16_bits // 2).bit_length() - 1)
    ones = constant(i16x32, 1)
    return side_by_side([dot_i16(zero(i32x16), row, ones) for row in merged(sums, times)], times)


def scales_of(form: Form, rows: Sequence[Value]) -> list[Value]:
    """f32x16 of the scales, and of the minimums if there are any: by block, then by row."""
    places = sorted(set(form.places))
    found = form.scales([w + at for at in places for w in rows])
    picks = [ROWS_TOGETHER * places.index(at) + r for at in form.places for r in range(ROWS_TOGETHER)]
    return [x if len(places) == QUAD else shuffle(x, picks) for x in found]


def for_each_row(x: Value) -> Value:
    """What belongs to a block beside each of its four rows."""
    return shuffle(x, [lane // ROWS_TOGETHER for lane in range(QUAD * ROWS_TOGETHER)])


@unrolled
def chain_sums(total: Value) -> Value:
    """The products of four rows out of the running sums."""
    total = low(total) + high(total)
    return low(total) + high(total)


@jit.inner
def rows(quad_dot, minimum, quad_bytes, w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    """The row kernel of every form (see `jit.row_kernel`), four rows at once; behind the last row it is computed again, and left out."""
    blocks = k // BLOCK
    last = (blocks - QUAD) * quad_bytes // QUAD
    end = n_rows - 1
    for r in range(0, n_rows, ROWS_TOGETHER):
        row0, row1, row2, row3 = w + r * stride, w + min(r + 1, end) * stride, w + min(r + 2, end) * stride, w + min(r + 3, end) * stride
        if last < 0:
            n_bytes = blocks * quad_bytes // QUAD
            row0, row1, row2, row3 = padded(row0, n_bytes), padded(row1, n_bytes), padded(row2, n_bytes), padded(row3, n_bytes)
        total, low_total, reached = zero(f32x16), zero(f32x16), w + r * stride
        for q in range((blocks + QUAD - 1) // QUAD):
            at = max(0, min(q * quad_bytes, last))
            total, low_total = quad_dot(
                total, low_total, row0 + at, row1 + at, row2 + at, row3 + at, reached + ROWS_TOGETHER * at, act + RECORD * q
            )
        if minimum:
            total = total + low_total
        store_lanes(out + 4 * r, chain_sums(total), n_rows - r)
