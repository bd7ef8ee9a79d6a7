"""Products of encodings without blocks.

Owns the arithmetic order, the same in both kernels: a row's products go lane by lane to one vector of running sums, in rising order; the
lanes are added by halves, and values that do not fill a span are added after them, one by one. Must not know formats: a `Form` says how to
load and multiply.

Lanes hold values of one row here, not rows as in `panel.py`: with nothing to unpack, laying rows side by side would cost as much as a few
activation rows' products, and a few weight rows times a few activation rows keep the multipliers busy as they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings.panel import AHEAD, ask_ahead, store_lanes
from vllm_cpp.kernels.simd import f32, fma, hsum, i64, in_order, load, minimum, pack, prefetch, store, unrolled, wide_registers, zero
from vllm_cpp.kernels.vectors import Value, VecType

# Lanes of a vector of sums; rows and activation rows of a tile: its sums stay in registers where there are 32 of 16 lanes, or 16 of 8.
LANES, TILE_ROWS, ACTS = (16, 6, 4) if wide_registers() else (8, 3, 4)
SUMS = VecType(f32, LANES)
CELLS = [(a, r) for a in range(ACTS) for r in range(TILE_ROWS)]
ROWS = 4  # rows a row kernel works on at once
STEPS = 2  # between two looks at the end of a row
NEAR_BYTES = 1 << 18  # weights gone through for one group of activation rows before the next: they stay in the second cache level


@dataclass(frozen=True)
class Form:
    """`step` values are multiplied at once: `multiply(load_weights(address), load_acts(address), sums)` adds their products to LANES sums.
    `load_weight` and `load_act` load one value as f32."""

    weight_bytes: int
    act_bytes: int
    load_weights: Callable[[Value], Value]
    load_acts: Callable[[Value], Value]
    load_weight: Callable[[Value], Value]
    load_act: Callable[[Value], Value]
    step: int = LANES
    multiply: Callable[[Value, Value, Value], Value] = fma

    @property
    def span(self) -> int:
        """Values that a kernel takes before it looks whether there are more."""
        return STEPS * self.step


def _ask_ahead(address: Value, n_bytes: int) -> None:
    """On CPUs with narrow registers, into the second cache and no further than a page: rows that are whole pages are followed by the CPU
    half of the way, and more asking costs more than it brings (docs/notes/decode-step.md)."""
    if wide_registers():
        ask_ahead(address, n_bytes)
        return
    for line in range(0, n_bytes, 64):
        prefetch(address + (AHEAD + line), 2)


def dots(form: Form) -> Callable:
    """Add one span of each of four weight rows, which lie together, times one of an activation row to the rows' sums. `reached` is how far
    into the four one has come."""

    def dot_spans(sums: tuple[Value, ...], w0: Value, w1: Value, w2: Value, w3: Value, reached: Value, act: Value) -> tuple[Value, ...]:
        _ask_ahead(reached, ROWS * form.span * form.weight_bytes)
        for at in range(0, form.span, form.step):
            values = form.load_acts(act + form.act_bytes * at)
            weights = [form.load_weights(w + form.weight_bytes * at) for w in (w0, w1, w2, w3)]
            sums = tuple(form.multiply(weight, values, row) for weight, row in zip(weights, sums, strict=True))
        return sums

    return unrolled(dot_spans)


def rests(form: Form) -> Callable:
    """Add one value's product to the totals of four rows, a row a lane."""

    def add_rest(total: Value, w0: Value, w1: Value, w2: Value, w3: Value, act: Value) -> Value:
        return fma(pack([form.load_weight(w) for w in (w0, w1, w2, w3)]), form.load_act(act), total)

    return unrolled(add_rest)


@unrolled
def no_sums() -> tuple[Value, ...]:
    return (zero(SUMS),) * ROWS


@unrolled
def totals_of(sums: tuple[Value, ...]) -> Value:
    return pack([hsum(row) for row in sums])


def cell_dots(form: Form) -> Callable:
    """Add one span's products to the sums of every cell of a tile."""

    def dot_spans(sums: tuple[Value, ...], ws: tuple[Value, ...], acts: tuple[Value, ...], at: Value) -> tuple[Value, ...]:
        sums = list(sums)
        for step in range(0, form.span, form.step):
            in_order()
            weights = [form.load_weights(w + at * form.weight_bytes + form.weight_bytes * step) for w in ws]
            for a, act in enumerate(acts):
                values = form.load_acts(act + at * form.act_bytes + form.act_bytes * step)
                for r in range(TILE_ROWS):
                    cell = CELLS.index((a, r))
                    sums[cell] = form.multiply(weights[r], values, sums[cell])
        return tuple(sums)

    return unrolled(dot_spans)


def cell_rests(form: Form) -> Callable:
    """Add one value's product to every cell's total."""

    def add_rest(totals: tuple[Value, ...], ws: tuple[Value, ...], acts: tuple[Value, ...], at: Value) -> tuple[Value, ...]:
        weights = [form.load_weight(w + at * form.weight_bytes) for w in ws]
        values = [form.load_act(act + at * form.act_bytes) for act in acts]
        return tuple(fma(weights[r], values[a], total) for total, (a, r) in zip(totals, CELLS, strict=True))

    return unrolled(add_rest)


@unrolled
def no_cell_sums() -> tuple[Value, ...]:
    return (zero(SUMS),) * len(CELLS)


@unrolled
def cell_totals(sums: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(hsum(cell) for cell in sums)


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
def rows(dot_spans, add_rest, span, weight_bytes, act_bytes, w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    """The row kernel of every format (see `jit.row_kernel`), four rows at once; behind the last row it is computed again, and left out."""
    last = n_rows - 1
    for r in range(0, n_rows, ROWS):
        row0, row1, row2, row3 = w + r * stride, w + min(r + 1, last) * stride, w + min(r + 2, last) * stride, w + min(r + 3, last) * stride
        sums = no_sums()
        for i in range(0, k - span + 1, span):
            at = weight_bytes * i
            sums = dot_spans(sums, row0 + at, row1 + at, row2 + at, row3 + at, row0 + ROWS * at, act + act_bytes * i)
        totals = totals_of(sums)
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
                sums = no_cell_sums()
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
