"""Products of encodings with 256-value superblocks and "q8k" activations.

Owns the arithmetic order, the same in both kernels and on every CPU: a block's sum of (value * scale) products is one exact integer, as
is its sum of (minimum * activation sum); each becomes f32 once and ends in a chain of fused multiply-adds over the blocks in order. Where
an encoding has one scale for both (`folded`), the two integers are subtracted first. Must not know how any encoding packs its blocks: a
`Form` says that.

An activation row (written by `quantize.py`): i8[k] quants; for each block i16[16] sums of 16 quants; for each block f32 d; padded to a
cache line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings.panel import GROUP, ROWS, WORD_BYTES, filled, store_lanes, transpose_rows
from vllm_cpp.kernels.simd import (
    convert,
    dot_i16,
    dots,
    dots_at_once,
    f32,
    f32x16,
    fma,
    i8x64,
    i16x32,
    i32,
    i32x4,
    i32x8,
    i32x16,
    i64,
    join,
    load,
    low,
    prefetch,
    reinterpret,
    shuffle,
    signed_offset,
    splat,
    store,
    u8x64,
    unrolled,
    unsigned_form,
    zero,
)
from vllm_cpp.kernels.vectors import Value

BLOCK = 256
LINES = 6  # of a staged block: 4 of quants, 16 scales as i32, then 16 minimums as i16, d, dmin
SCALE_LINE, MIN_LINE, D_WORD = 4, 5, 8
COLUMN_BYTES = LINES * 16 * WORD_BYTES
STAGED_BYTES = LINES * 64 * GROUP
ACTS = 4


@dataclass(frozen=True)
class Form:
    """How an encoding's superblock unpacks. A value is d * scale * q - dmin * minimum, or with `zero` given d * scale * (q - zero); scale
    and minimum are shared by 16 values, by 32 if `sub` says so.

    unpack(address) -> (quants, scales, minimums, d): four byte vectors x64 in order, u8, or i8 with `signed`; i16x16 scales; i16x16
    minimums, or None with `zero`; f32x4 holding d and dmin in turn.
    """

    block_bytes: int
    unpack: Callable[[Value], tuple[Iterable[Value], Value, Value | None, Value]]
    largest: int
    sub: int = 16
    zero: int | None = None
    signed: bool = False

    def unpacked(self, w: Value) -> tuple[Iterable[Value], Value, Value | None, Value]:
        quants, scales, minimums, d = self.unpack(w)
        if self.signed:
            quants = [unsigned_form(q) for q in quants]
        return quants, scales, scales * self.dot_zero if self.dot_zero else minimums, d

    @property
    def folded(self) -> bool:
        """Whether quants and minimums share d, so that their integer sums can be subtracted before they become f32."""
        return self.zero is not None

    @property
    def whole_range(self) -> bool:
        """Whether quants are multiplied as u8 up to 255, too large for sums of 16 bits."""
        return self.signed and signed_offset() != 0

    @property
    def dot_zero(self) -> int:
        """The zero point of the quants as they are multiplied."""
        return (self.zero or 0) + (signed_offset() if self.signed else 0)


def row_bytes(k: int) -> int:
    """An activation row, to whole cache lines."""
    return -(-(k // BLOCK * 292) // 64) * 64


@jit.inner
def sums_at(k):  # type: ignore[no-untyped-def]
    return k


@jit.inner
def scales_at(k):  # type: ignore[no-untyped-def]
    return k + k // 8


def stage(form: Form) -> Callable:
    """Unpack one block of one row to the lines of a panel, and ask for the one `ahead` bytes later: the same row of the next panel."""

    def stage_block(w: Value, ahead: Value, to: Value) -> None:
        for line in range(0, form.block_bytes, 64):
            prefetch(w + ahead + line, 2)
        quants, scales, minimums, d = form.unpacked(w)
        for j, q in enumerate(quants):
            store(to + 64 * j, q)
        store(to + 64 * SCALE_LINE, convert(i32x16, scales))
        lows = zero(i32x8) if minimums is None else reinterpret(i32x8, minimums)
        store(to + 64 * MIN_LINE, join(lows, low(filled(reinterpret(i32x4, d)))))

    return unrolled(stage_block)


def values(form: Form) -> Callable:
    """Decode one block to 256 f32."""

    def block_values(w: Value, out: Value) -> None:
        quants, scales, minimums, d = form.unpack(w)
        quants = list(quants)
        scales = convert(f32x16, convert(i32x16, scales)) * d[0]
        lows = None if form.folded else convert(f32x16, convert(i32x16, minimums)) * d[1]
        for group in range(16):
            q = shuffle(quants[group // 4], range(16 * (group % 4), 16 * (group % 4) + 16))
            if form.folded:
                x = convert(f32x16, convert(i32x16, q) - form.zero) * splat(f32x16, scales[group])
            else:
                x = convert(f32x16, convert(i32x16, q)) * splat(f32x16, scales[group]) - splat(f32x16, lows[group])
            store(out + 64 * group, x)

    return unrolled(block_values)


class Tile:
    """The compiled-in pieces of one form's tile kernel. Values are kept by cell: (activation row, group of rows)."""

    def __init__(self, form: Form):
        self.form = form
        self.cells = [(a, g) for a in range(ACTS) for g in range(ROWS // GROUP)]
        self.none = unrolled(self._none)
        self.begin = unrolled(self._begin)
        self.add = unrolled(self._add)
        self.end = unrolled(self._end)
        self.total = unrolled(self._total)

    def _none(self) -> tuple[Value, ...]:
        return (zero(f32x16),) * (len(self.cells) * (1 if self.form.folded else 2))

    def _minimum_sums(self, columns: Value, sums: tuple[Value, ...]) -> list[Value]:
        total = [zero(i32x16) for _ in self.cells]
        for pair in range(8):
            lows = [load(i16x32, columns + ((16 * MIN_LINE + pair) * WORD_BYTES + 64 * g)) for g in range(ROWS // GROUP)]
            same = [reinterpret(i16x32, splat(i32x16, load(i32, s + 4 * pair))) for s in sums]
            total = [dot_i16(t, lows[g], same[a]) for t, (a, g) in zip(total, self.cells, strict=True)]
        return total

    def _begin(self, columns: Value, *sums: Value) -> tuple[Value, ...]:
        """A block's integer sums before its first sub-block."""
        if self.form.dot_zero:
            return tuple(-t for t in self._minimum_sums(columns, sums))
        return (zero(i32x16),) * len(self.cells)

    def _add(self, whole: tuple[Value, ...], columns: Value, scales: Value, *acts: Value) -> tuple[Value, ...]:
        """Add one sub-block."""
        form = self.form
        kind = i8x64 if form.signed and not signed_offset() else u8x64
        part = [zero(i32x16) for _ in self.cells]
        for start in range(0, form.sub // 4, dots_at_once(form.largest)):
            pairs: list[list] = [[] for _ in self.cells]
            for word in range(start, min(form.sub // 4, start + dots_at_once(form.largest))):
                weights = [load(kind, columns + (word * WORD_BYTES + 64 * g)) for g in range(ROWS // GROUP)]
                same = [reinterpret(i8x64, splat(i32x16, load(i32, act + 4 * word))) for act in acts]
                for i, (a, g) in enumerate(self.cells):
                    pairs[i].append((weights[g], same[a]))
            part = [dots(t, p, form.largest) for t, p in zip(part, pairs, strict=True)]
        by_row = [load(i32x16, scales + 64 * g) for g in range(ROWS // GROUP)]
        return tuple(w + t * by_row[g] for w, t, (_, g) in zip(whole, part, self.cells, strict=True))

    def _end(
        self, totals: tuple[Value, ...], whole: tuple[Value, ...], columns: Value, acts: tuple[Value, ...], sums: tuple[Value, ...]
    ) -> tuple:
        """Add a block's integer sums to the running totals; `acts` are addresses of the activation blocks' d."""
        totals = list(totals)
        d_at = columns + (16 * MIN_LINE + D_WORD) * WORD_BYTES
        scales = [load(f32, act) for act in acts]
        for i, (a, g) in enumerate(self.cells):
            totals[i] = fma(convert(f32x16, whole[i]), load(f32x16, d_at + 64 * g) * scales[a], totals[i])
        if not self.form.folded:
            for i, (t, (a, g)) in enumerate(zip(self._minimum_sums(columns, sums), self.cells, strict=True)):
                j = len(self.cells) + i
                totals[j] = fma(convert(f32x16, t), load(f32x16, d_at + (WORD_BYTES + 64 * g)) * scales[a], totals[j])
        return tuple(totals)

    def _total(self, totals: tuple[Value, ...], to: Value) -> None:
        """Store the finished products, a cell after the other."""
        n = len(self.cells)
        for i in range(n):
            store(to + 64 * i, totals[i] if self.form.folded else totals[i] - totals[n + i])


def scratch_bytes(k: int) -> int:
    """Bytes of scratch the tile kernels need for rows of k values."""
    return 64 + STAGED_BYTES + k // BLOCK * COLUMN_BYTES


@jit.inner
def tile(stage_block, none, begin, add, end, total, sub, block_bytes, w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    """The tile kernel of every form (see `jit.tile_kernel`); `stage_block` and the next five are its `Tile`'s pieces."""
    staged = (scratch + 63) // 64 * 64
    columns = staged + STAGED_BYTES
    blocks = k // BLOCK
    for first in range(0, n_rows, ROWS):
        for b in range(blocks):
            for group in range(0, ROWS, GROUP):
                for i in range(GROUP):
                    row = w + min(first + group + i, n_rows - 1) * stride
                    stage_block(row + block_bytes * b, ROWS * stride, staged + 64 * LINES * i)
                transpose_rows(staged, LINES, columns + COLUMN_BYTES * b + 4 * group)
        for a in range(0, n_acts, ACTS):
            a0 = load(i64, acts + 8 * a)
            a1 = load(i64, acts + 8 * min(a + 1, n_acts - 1))
            a2 = load(i64, acts + 8 * min(a + 2, n_acts - 1))
            a3 = load(i64, acts + 8 * min(a + 3, n_acts - 1))
            totals = none()
            for b in range(blocks):
                column = columns + COLUMN_BYTES * b
                at = sums_at(k) + 32 * b
                whole = begin(column, a0 + at, a1 + at, a2 + at, a3 + at)
                for s in range(BLOCK // sub):
                    q = BLOCK * b + sub * s
                    scale = column + (16 * SCALE_LINE + sub // 16 * s) * WORD_BYTES
                    whole = add(whole, column + sub // 4 * s * WORD_BYTES, scale, a0 + q, a1 + q, a2 + q, a3 + q)
                d = scales_at(k) + 4 * b
                totals = end(totals, whole, column, (a0 + d, a1 + d, a2 + d, a3 + d), (a0 + at, a1 + at, a2 + at, a3 + at))
            total(totals, staged)
            for j in range(min(ACTS, n_acts - a)):
                out = load(i64, outs + 8 * (a + j)) + 4 * first
                for g in range(ROWS // GROUP):
                    store_lanes(out + 64 * g, load(f32x16, staged + 64 * (j * (ROWS // GROUP) + g)), n_rows - first - GROUP * g)


@jit.inner
def decode(block_values, block_bytes, w, k, out):  # type: ignore[no-untyped-def]
    """The decode kernel of every form (see `jit.decode_kernel`)."""
    for b in range(k // BLOCK):
        block_values(w + block_bytes * b, out + 4 * BLOCK * b)
