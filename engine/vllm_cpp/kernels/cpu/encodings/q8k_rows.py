"""Row products of encodings with 256-value superblocks: four weight rows at once times one "q8k" activation row.

Owns how the exact integer sums of `q8k.py` are gathered. Four rows share what one row would do by itself: activations are loaded once,
the heads of four blocks are unpacked together, and quants are multiplied in the order in which they lie. With registers of 64 bytes each
row keeps its own sums to the end of a block, and they are folded then. With narrower ones, of which there are fewer too, four rows' sums
of 16 bits are brought side by side first, as far as these must fit, and scaled then: one step for four rows, and one sum to keep. Must not
know how any encoding packs its blocks.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings.panel import across, ask_ahead, interleaved, merged, store_lanes
from vllm_cpp.kernels.cpu.encodings.q8k import BLOCK, Form, scales_at, sums_at
from vllm_cpp.kernels.simd import (
    convert,
    dot_i16,
    dots,
    f32,
    f32x4,
    fma,
    high,
    i8x16,
    i8x32,
    i16x16,
    i16x32,
    i32x8,
    i32x16,
    join,
    load,
    low,
    opaque,
    pair_sums,
    pinned,
    reinterpret,
    repeat,
    shuffle,
    u8x32,
    u16x16,
    u32x4,
    unrolled,
    unsigned_form,
    wide_registers,
    zero,
)
from vllm_cpp.kernels.vectors import Value, constant

PARTS = 4  # vectors of 64 quants in a block


@dataclass(frozen=True)
class Quants:
    """A block's quants as they lie: of(address) gives four byte vectors x64, one after another; `order[j]` says which of the block's 16
    groups of 16 values the j-th holds."""

    of: Callable[[Value], Iterable[Value]]
    order: Sequence[Sequence[int]] = tuple(tuple(range(4 * j, 4 * j + 4)) for j in range(PARTS))


@dataclass(frozen=True)
class Heads:
    """What stands beside the quants in one block of each of four rows: i16x16 scales, of which lane `scale_of[g]` is that of the g-th 16
    values, or None where all are 1; i16x16 minimums, of which lane `minimum_of[g]` is, or None; d and dmin (None where an encoding has one
    scale for both) as f32x4, a row a lane. Where registers are narrow, scales and minimums of one byte may come as columns instead."""

    scales: Sequence[Value] | ByteColumns | None
    minimums: Sequence[Value] | ByteColumns | None
    d: Value
    dmin: Value | None
    scale_of: Sequence[int] = range(16)
    minimum_of: Sequence[int] = range(16)


def spread() -> list[int]:
    """In which order 16 scales are best held: where registers are narrow, those of even groups in the lower half, as they are needed
    there."""
    return list(range(16)) if wide_registers() else [*range(0, 16, 2), *range(1, 16, 2)]


def in_spread() -> list[int]:
    """Where each group's scale is then."""
    order = spread()
    return [order.index(group) for group in range(16)]


@dataclass(frozen=True)
class Four:
    """One block of each of four rows, and the activation block that they are multiplied with."""

    form: Form
    lie: Quants
    heads: Heads
    blocks: Sequence[Value]
    quants: Value  # address of the activations
    sums: Value  # i16x16
    reached: Value

    def acts(self) -> Iterator[Value]:
        """The activations in the order of the weights, loaded one vector after another."""
        for groups in self.lie.order:
            pairs = [groups[:2], groups[2:]]
            yield join(*(self._two_groups(*pair) for pair in pairs))

    def _two_groups(self, first: int, second: int) -> Value:
        at = self.quants + 16 * first
        return load(i8x32, at) if second == first + 1 else join(load(i8x16, at), load(i8x16, self.quants + 16 * second))

    def rows(self) -> list[Iterable[Value]]:
        """The quants of each row, one vector after another."""
        return [self.lie.of(w) for w in self.blocks]

    def ask_ahead(self, part: int) -> None:
        """One of PARTS shares: all at once would hold up the loads behind it."""
        ask_ahead(self.reached, len(self.blocks) * self.form.block_bytes, (part, PARTS))


def four_dots(form: Form, heads_of: Callable[[Sequence[Value]], Heads], wide: Quants, narrow: Quants | None = None) -> Callable:
    """Totals + one block of each of four weight rows times one of an activation row: two f32x4 of running sums, a row a lane, of the d
    parts and of the dmin parts. Quants lie as is best for wide registers and for `narrow` ones, where that differs."""
    lie = wide if wide_registers() or narrow is None else narrow
    integer_sums = sums_apart if wide_registers() else sums_side_by_side

    def block_dots(
        total: Value, low_total: Value, w0: Value, w1: Value, w2: Value, w3: Value, reached: Value, quants: Value, sums: Value, d: Value
    ) -> tuple[Value, Value]:
        blocks = (w0, w1, w2, w3)
        heads = heads_of(blocks)
        four = Four(form, lie, heads, blocks, quants, load(i16x16, sums), reached)
        whole, lows = unscaled_sums(four) if heads.scales is None else integer_sums(four)
        act_d = load(f32, d)
        if not form.folded:
            low_total = fma(convert(f32x4, lows), heads.dmin * act_d, low_total)
        return fma(convert(f32x4, whole), heads.d * act_d, total), low_total

    return unrolled(block_dots)


def sums_apart(four: Four) -> tuple[Value, Value | None]:
    """A block's two integer sums, i32x4 with a row a lane; of a form that is `folded` their difference and None. One row after another."""
    form, heads = four.form, four.heads
    acts = list(four.acts())
    if not form.folded:
        minimums = [shuffle(row, heads.minimum_of) for row in heads.minimums]
    whole = []
    for r, (scales, quants) in enumerate(zip(heads.scales, four.rows(), strict=True)):
        four.ask_ahead(r)
        row = zero(i32x16)
        by_quarter = ByQuarter(convert(i32x16, scales) if form.whole_range else scales, four.lie.order, heads.scale_of)
        for j, (act, q) in enumerate(zip(acts, quants, strict=True)):
            if form.whole_range:
                row = row + dots(zero(i32x16), [(unsigned_form(q), act)], form.largest) * by_quarter.of(j)
            else:
                row = dot_i16(row, pair_sums(q, act), reinterpret(i16x32, by_quarter.of(j)))
        whole.append(row)
    if form.folded:
        if form.dot_zero:
            by_lane = sums_by_lane(four.sums, heads.scale_of)
            lows = [dot_i16(zero(i32x8), scales * form.dot_zero, by_lane) for scales in heads.scales]
            return across([low(row) + high(row) - row_low for row, row_low in zip(whole, lows, strict=True)]), None
        return across(whole), None
    return across(whole), across([dot_i16(zero(i32x8), row, four.sums) for row in minimums])


class ByQuarter:
    """16 scales of a row as registers of 64 bytes multiply them: each quarter of one, which holds 16 quants, has the scales that the four
    vectors of a block want there. Picking a vector's is a step within quarters then, half as long as one across them."""

    def __init__(self, scales: Value, order: Sequence[Sequence[int]], scale_of: Sequence[int]):
        per_word = 32 // scales.type.element.bitwidth
        picks = [scale_of[order[j][quarter]] for quarter in range(4) for j in range(PARTS) for _ in range(per_word)]
        self.words = opaque(reinterpret(i32x16, shuffle(scales, picks)))

    def of(self, j: int) -> Value:
        """Those of vector `j`, i32x16: a scale, or a 16-bit scale twice."""
        return shuffle(self.words, [4 * quarter + j for quarter in range(4) for _ in range(4)])


def sums_side_by_side(four: Four) -> tuple[Value, Value | None]:
    """The same, one vector of each row after another."""
    form, heads = four.form, four.heads
    folds = folds_that_fit(form.largest)
    scales = heads.scales if isinstance(heads.scales, ByteColumns) else Columns(heads.scales, folds)
    whole, lows = [zero(i32x8)] * (len(four.blocks) >> folds), None
    if not form.folded:
        minimums = heads.minimums if isinstance(heads.minimums, ByteColumns) else Columns(heads.minimums, folds)
        lows = pinned(across(minimums.times(four.sums, heads.minimum_of), folds))
    elif form.zero:
        whole = [pinned(row * -form.zero) for row in scales.times(four.sums, heads.scale_of)]
    for j, (groups, act, *rows) in enumerate(zip(four.lie.order, four.acts(), *four.rows(), strict=True)):
        four.ask_ahead(j)
        # of signed bytes the first's size is taken, which four rows share
        pairs = merged([pair_sums(act, q) if form.signed else pair_sums(q, act) for q in rows], folds)
        for half, part in enumerate((low, high)):
            by_pair = scales.of([heads.scale_of[g] for g in groups[2 * half : 2 * half + 2]])
            whole = [dot_i16(total, part(row), scale) for total, row, scale in zip(whole, pairs, by_pair, strict=True)]
        whole = [pinned(total) for total in whole]
    return across(whole, folds), lows


def unscaled_sums(four: Four) -> tuple[Value, None]:
    """The same of a form that is `folded` and whose scales are all 1, row after row."""
    largest, zeros = four.form.largest, dot_i16(zero(i32x8), constant(i16x16, four.form.dot_zero), four.sums)
    whole = []
    for r, quants in enumerate(four.rows()):
        four.ask_ahead(r)
        pairs = list(zip(quants, four.acts(), strict=True))
        if wide_registers():
            row = dots(zero(i32x16), pairs, largest)
            whole.append(low(row) + high(row) - zeros)
        else:
            both = functools.reduce(operator.add, [pair_sums(q, act) for q, act in pairs])
            whole.append(pinned(low(both) + high(both)))
    if wide_registers():
        return across(whole), None
    (pairs,) = merged(whole, 2)
    return across([dot_i16(zero(i32x8), pairs, constant(i16x16, 1))], 2) - across([zeros] * 4), None


def folds_that_fit(largest: int) -> int:
    """How often pair sums of values up to `largest` can be added to each other in 16 bits, but not more than four rows take."""
    return min(2, (32767 // (2 * 127 * largest)).bit_length() - 1)


class Columns:
    """16 scales of each of four rows, two of a row beside two of the next, as pair sums that were `merged` `folds` times lie."""

    def __init__(self, rows: Sequence[Value], folds: int):
        self.folds = folds
        self.vectors = [[reinterpret(i16x16, x) for x in rows_side_by_side] for rows_side_by_side in interleaved(rows, folds)]
        self.twice: dict[tuple[int, int], list[Value]] = {}

    def of(self, lanes: Sequence[int]) -> list[Value]:
        """The scales of two lanes, the first for the lower half of a vector of pair sums, the second for the upper."""
        place = [lane % 8 // (8 >> self.folds) for lane in lanes]
        words = [[self._word(lane, i) for i in range(8)] for lane in lanes]
        if lanes[0] // 8 == lanes[1] // 8:  # one half twice
            at = place[0], lanes[0] // 8
            if at not in self.twice:
                self.twice[at] = [opaque(repeat((low, high)[at[1]](rows[at[0]]), 2)) for rows in self.vectors]
            return [shuffle(x, [*words[0], *(8 + w for w in words[1])]) for x in self.twice[at]]
        picks = [8 * (lane // 8) + w for lane, of_lane in zip(lanes, words, strict=True) for w in of_lane]
        return [shuffle(rows[place[0]], picks) for rows in self.vectors]

    def _word(self, lane: int, i: int) -> int:
        """Which of eight 16-bit lanes holds the scale of `lane` that belongs to the i-th pair sum."""
        row = i // 2 // (4 >> self.folds)
        pair = lane % 8 // 2 % (4 >> self.folds)
        return 2 * (row * (4 >> self.folds) + pair) + lane % 2

    def times(self, sums: Value, lane_of: Sequence[int]) -> list[Value]:
        """The sum of all scales times the sums of the groups they belong to, i32x8 to be merged further."""
        by_lane = sums_by_lane(sums, lane_of)
        pairs = [reinterpret(i16x16, x) for x in interleaved([by_lane] * 4, self.folds)[0]]
        totals = []
        for rows in self.vectors:
            total = zero(i32x8)
            for scales, same in zip(rows, pairs, strict=True):
                total = dot_i16(total, scales, same)
            totals.append(total)
        return totals


class ByteColumns:
    """The same of scales that are unsigned bytes, for pair sums that were `merged` twice: one for each 16 values, or for each 32."""

    def __init__(self, words: Sequence[Value]):
        """`words`: u32x4 with four scales of a row a lane, in order."""
        self.words = words
        self.twice = [opaque(reinterpret(u8x32, repeat(word, 2))) for word in words]

    @classmethod
    def transposed(cls, rows: Sequence[Value]) -> Sequence[Value]:
        """Four rows of four words: each word of all rows, a row a lane."""
        return [reinterpret(u32x4, x) for x in interleaved(rows, 2)[0]]

    def of(self, lanes: Sequence[int]) -> list[Value]:
        """As `Columns.of`; both scales stand in one word."""
        picks = [16 * half + 4 * row + lane % 4 for half, lane in enumerate(lanes) for row in range(4) for _ in range(2)]
        nothing = 32
        return [reinterpret(i16x16, shuffle(self.twice[lanes[0] // 4], [i for pick in picks for i in (pick, nothing)], zero(u8x32)))]

    def times(self, sums: Value, _lane_of: Sequence[int]) -> list[Value]:
        """As `Columns.times`."""
        n = len(self.words)
        by_lane = sums if n == 4 else reinterpret(i16x16, dot_i16(zero(i32x8), sums, constant(i16x16, 1)))  # of 32 values
        apart = 4 // n
        total = zero(i32x8)
        for i, (word, other) in enumerate(zip(self.words[: n // 2], self.words[n // 2 :], strict=True)):
            both = reinterpret(u16x16, join(word, other))
            for odd, scales in enumerate((both & 255, both >> 8)):
                pair = [apart * (4 * i + odd), apart * (4 * i + odd + 2)]
                same = shuffle(by_lane, [*pair * 4, *(8 + lane for lane in pair * 4)])
                total = dot_i16(total, reinterpret(i16x16, scales), same)
        return [total]


def sums_by_lane(sums: Value, lane_of: Sequence[int]) -> Value:
    """For each of 16 lanes, the sums of the groups that it belongs to."""
    groups = [[g for g in range(16) if lane_of[g] == lane] for lane in range(16)]
    depth = max(len(of_lane) for of_lane in groups)
    nothing = zero(i16x16)
    parts = [shuffle(sums, [of_lane[i] if i < len(of_lane) else 16 for of_lane in groups], nothing) for i in range(depth)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@jit.inner
def rows(block_dots, one_scale, block_bytes, w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    """The row kernel of every form (see `jit.row_kernel`); behind the last row it is computed again, and left out. `one_scale`: the form is
    `folded`."""
    last = n_rows - 1
    for r in range(0, n_rows, 4):
        row0, row1, row2, row3 = w + r * stride, w + min(r + 1, last) * stride, w + min(r + 2, last) * stride, w + min(r + 3, last) * stride
        total, low_total = zero(f32x4), zero(f32x4)
        for b in range(k // BLOCK):
            at = block_bytes * b
            total, low_total = block_dots(
                total, low_total, row0 + at, row1 + at, row2 + at, row3 + at, row0 + 4 * at,
                act + BLOCK * b, act + sums_at(k) + 32 * b, act + scales_at(k) + 4 * b,
            )  # fmt: skip
        if not one_scale:
            total = total - low_total
        store_lanes(out + 4 * r, total, n_rows - r)
