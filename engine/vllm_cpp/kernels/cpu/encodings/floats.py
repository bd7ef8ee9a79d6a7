"""Products of encodings without blocks.

Owns the arithmetic order, the same in both kernels: a row is cut into spans; the two halves of a span each go lane by lane to 16 running
sums, in rising order; the 32 sums are added by halves, and what does not fill a span is added after them, one by one. Must not know
formats: a `Form` says how to load and multiply.

Sixteen lanes hold values of one row here, not sixteen rows as in `panel.py`: with nothing to unpack, laying rows side by side would cost
as much as a few activation rows' products, and a few weight rows times a few activation rows keep the multipliers busy as they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings.panel import AHEAD, ask_ahead, store_lanes
from vllm_cpp.kernels.simd import f32x16, fma, hsum, i64, load, minimum, pack, prefetch, store, unrolled, zero
from vllm_cpp.kernels.vectors import Value, features

# Rows and activation rows a tile works on at once: all their sums stay in registers, of which there are 32 of 16 lanes or 16 of 8.
TILE_ROWS, ACTS = (3, 4) if "avx512f" in features() else (1, 3)
CELLS = [(a, r) for a in range(ACTS) for r in range(TILE_ROWS)]
NEAR_BYTES = 1 << 18  # weights gone through for one group of activation rows before the next: they stay in the second cache level


@dataclass(frozen=True)
class Form:
    """`span` values are one step: half of them each for two pairs of `load_weights(address)` and `load_acts(address)`, whose products
    `multiply(weights, acts, sums)` adds to 16 sums. `load_weight` and `load_act` load one value as f32."""

    weight_bytes: int
    act_bytes: int
    span: int
    load_weights: Callable[[Value], Value]
    load_acts: Callable[[Value], Value]
    multiply: Callable[[Value, Value, Value], Value]
    load_weight: Callable[[Value], Value]
    load_act: Callable[[Value], Value]


def dot(form: Form) -> Callable:
    """Add one span of a weight row times one of an activation row to two vectors of sums."""

    def dot_span(sums: tuple[Value, Value], w: Value, act: Value) -> tuple[Value, Value]:
        for line in range(0, form.span * form.weight_bytes, 64):
            prefetch(w + (AHEAD + line))
        half = form.span // 2
        return tuple(
            form.multiply(form.load_weights(w + form.weight_bytes * half * h), form.load_acts(act + form.act_bytes * half * h), sums[h])
            for h in range(2)
        )

    return unrolled(dot_span)


def four_dots(form: Form) -> Callable:
    """The same for four weight rows, which lie together: their sums in turn. `reached` is how far into the four one has come."""

    def dot_spans(sums: tuple[Value, ...], w0: Value, w1: Value, w2: Value, w3: Value, reached: Value, act: Value) -> tuple[Value, ...]:
        ask_ahead(reached, 4 * form.span * form.weight_bytes)
        sums = list(sums)
        for h in range(2):
            half = form.span // 2 * h
            values = form.load_acts(act + form.act_bytes * half)
            for r, w in enumerate((w0, w1, w2, w3)):
                sums[2 * r + h] = form.multiply(form.load_weights(w + form.weight_bytes * half), values, sums[2 * r + h])
        return tuple(sums)

    return unrolled(dot_spans)


def four_rests(form: Form) -> Callable:
    """Add one value's product to the totals of four rows, a row a lane."""

    def add_rest(total: Value, w0: Value, w1: Value, w2: Value, w3: Value, act: Value) -> Value:
        return fma(pack([form.load_weight(w) for w in (w0, w1, w2, w3)]), form.load_act(act), total)

    return unrolled(add_rest)


@unrolled
def no_four_sums() -> tuple[Value, ...]:
    return (zero(f32x16),) * 8


@unrolled
def four_totals(sums: tuple[Value, ...]) -> Value:
    return pack([hsum(sums[2 * r] + sums[2 * r + 1]) for r in range(4)])


def dot_cells(form: Form) -> Callable:
    """The same for every cell of a tile; the two vectors of a cell stand together."""

    def dot_spans(sums: tuple[Value, ...], ws: tuple[Value, ...], acts: tuple[Value, ...], at: Value) -> tuple[Value, ...]:
        sums = list(sums)
        for h in range(2):
            half = form.span // 2 * h
            weights = [form.load_weights(w + at * form.weight_bytes + form.weight_bytes * half) for w in ws]
            for a, act in enumerate(acts):
                values = form.load_acts(act + at * form.act_bytes + form.act_bytes * half)
                for r in range(TILE_ROWS):
                    i = 2 * CELLS.index((a, r)) + h
                    sums[i] = form.multiply(weights[r], values, sums[i])
        return tuple(sums)

    return unrolled(dot_spans)


def rest_cells(form: Form) -> Callable:
    """Add one value's product to every cell's total."""

    def add_rest(totals: tuple[Value, ...], ws: tuple[Value, ...], acts: tuple[Value, ...], at: Value) -> tuple[Value, ...]:
        weights = [form.load_weight(w + at * form.weight_bytes) for w in ws]
        values = [form.load_act(act + at * form.act_bytes) for act in acts]
        return tuple(fma(weights[r], values[a], total) for total, (a, r) in zip(totals, CELLS, strict=True))

    return unrolled(add_rest)


@unrolled
def no_sums() -> tuple[Value, ...]:
    return (zero(f32x16),) * (2 * len(CELLS))


@unrolled
def cell_totals(sums: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(hsum(sums[2 * i] + sums[2 * i + 1]) for i in range(len(CELLS)))


@unrolled
def addresses(base: Value, stride: Value, first: Value, stop: Value) -> tuple[Value, ...]:
    """Of a tile's weight rows; the last row again for those beyond it."""
    return tuple(base + minimum(first + r, stop - 1) * stride for r in range(TILE_ROWS))


@unrolled
def table_entries(table: Value, first: Value, stop: Value) -> tuple[Value, ...]:
    return tuple(load(i64, table + minimum(first + a, stop - 1) * 8) for a in range(ACTS))


@unrolled
def store_totals(totals: tuple[Value, ...], outs: tuple[Value, ...], first: Value, stop: Value) -> None:
    """Cells beyond the last row or activation row repeat it: they store the same number once more."""
    for total, (a, r) in zip(totals, CELLS, strict=True):
        store(outs[a] + minimum(first + r, stop - 1) * 4, total)


@jit.inner
def rows(dot_span, load_weight, load_act, span, weight_bytes, act_bytes, w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    """The row kernel of every format (see `jit.row_kernel`)."""
    for r in range(n_rows):
        row = w + r * stride
        sums = (zero(f32x16), zero(f32x16))
        for i in range(0, k - span + 1, span):
            sums = dot_span(sums, row + weight_bytes * i, act + act_bytes * i)
        total = hsum(sums[0] + sums[1])
        for i in range(k // span * span, k):
            total = fma(load_weight(row + weight_bytes * i), load_act(act + act_bytes * i), total)
        store(out + 4 * r, total)


@jit.inner
def rows_by_four(dot_spans, add_rest, span, weight_bytes, act_bytes, w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    """The same, four rows at once, for formats that memory alone brings in too slowly; behind the last row it is computed again, and left
    out."""
    last = n_rows - 1
    for r in range(0, n_rows, 4):
        row0, row1, row2, row3 = w + r * stride, w + min(r + 1, last) * stride, w + min(r + 2, last) * stride, w + min(r + 3, last) * stride
        sums = no_four_sums()
        for i in range(0, k - span + 1, span):
            at = weight_bytes * i
            sums = dot_spans(sums, row0 + at, row1 + at, row2 + at, row3 + at, row0 + 4 * at, act + act_bytes * i)
        totals = four_totals(sums)
        for i in range(k // span * span, k):
            at = weight_bytes * i
            totals = add_rest(totals, row0 + at, row1 + at, row2 + at, row3 + at, act + act_bytes * i)
        store_lanes(out + 4 * r, totals, n_rows - r)


@jit.inner
def tile(dot_spans, add_rest, span, weight_bytes, w, stride, n_rows, k, acts, n_acts, outs):  # type: ignore[no-untyped-def]
    """The tile kernel of every format (see `jit.tile_kernel`)."""
    near_rows = max(1, NEAR_BYTES // (weight_bytes * k) // TILE_ROWS) * TILE_ROWS
    for start in range(0, n_rows, near_rows):
        stop = min(start + near_rows, n_rows)
        for a in range(0, n_acts, ACTS):
            act_rows = table_entries(acts, a, n_acts)
            out_rows = table_entries(outs, a, n_acts)
            for first in range(start, stop, TILE_ROWS):
                ws = addresses(w, stride, first, stop)
                sums = no_sums()
                for i in range(0, k - span + 1, span):
                    sums = dot_spans(sums, ws, act_rows, i)
                totals = cell_totals(sums)
                for i in range(k // span * span, k):
                    totals = add_rest(totals, ws, act_rows, i)
                store_totals(totals, out_rows, first, stop)


@jit.inner
def decode(load_weight, weight_bytes, w, k, out):  # type: ignore[no-untyped-def]
    """The decode kernel of every format (see `jit.decode_kernel`)."""
    for i in range(k):
        store(out + 4 * i, load_weight(w + weight_bytes * i))
