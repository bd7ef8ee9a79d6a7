"""Many weight rows side by side: the panels that tile kernels read, and what row kernels share that take four rows at once.

Owns one transposition, the folding of several rows' sums into the lanes of one vector, and how far ahead of themselves kernels ask for
weights. A row is first unpacked to lines of 64 bytes; sixteen rows' lines become columns: for each 4-byte word of a line,
that word of all rows side by side, so that one vector holds sixteen rows and an activation word is repeated across it. A product then
needs no horizontal sums, and every row's sum is one lane. Must not know what the words mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.simd import high, i32, i32x16, i64, join, load, low, prefetch, reinterpret, shuffle, store, unrolled, wide_registers
from vllm_cpp.kernels.vectors import Value, VecType, constant

AHEAD = 4096  # bytes that row kernels prefetch ahead: hardware stops at page ends, this does not
FAR_AHEAD = 4 * AHEAD  # and where several rows are read side by side, which hardware does not follow, into the second cache
GROUP = 16
# Rows a tile kernel works on at once: two vectors of 16 where there are 32 wide registers to hold their sums.
ROWS = 32 if wide_registers() else 16
WORD_BYTES = 4 * ROWS


def _picked(x: Value, y: Value, lanes: Sequence[int]) -> Value:
    """In each 128 bits, 32-bit lanes of x (0 to 3) and of y (4 to 7)."""
    n = x.type.lanes
    return shuffle(x, [base + lane % 4 + (n if lane >= 4 else 0) for base in range(0, n, 4) for lane in lanes], y)


# Of each 128 bits of two vectors the lower halves and the upper halves, alternating by one or by two 32-bit lanes.
_ALTERNATING = {1: ((0, 4, 1, 5), (2, 6, 3, 7)), 2: ((0, 1, 4, 5), (2, 3, 6, 7))}


def _interleave(x: Value, y: Value, width: int) -> tuple[Value, Value]:
    lower, upper = _ALTERNATING[width]
    return _picked(x, y, lower), _picked(x, y, upper)


@unrolled
def transpose_lines(source: Value, row_bytes: Value, to: Value, four_bytes: Value, word_bytes: Value) -> None:
    """Sixteen lines (16 words each, `row_bytes` apart) to sixteen columns: `word_bytes` apart, each four of them `four_bytes` from the
    next four."""
    lines = [load(i32x16, source + row_bytes * r) for r in range(GROUP)]
    fours = []  # fours[a][j]: 128 bits number q hold word 4q + j of rows 4a .. 4a + 3
    for a in range(0, GROUP, 4):
        low01, high01 = _interleave(lines[a], lines[a + 1], 1)
        low23, high23 = _interleave(lines[a + 2], lines[a + 3], 1)
        fours.append([*_interleave(low01, low23, 2), *_interleave(high01, high23, 2)])
    for j in range(4):
        x = [fours[a][j] for a in range(4)]
        halves = [range(8), range(8, 16)]
        for half, lanes in enumerate(halves):
            picks = [*lanes, *(16 + i for i in lanes)]
            front, back = shuffle(x[0], picks, x[1]), shuffle(x[2], picks, x[3])
            for odd in range(2):
                quarter = [*range(4 * odd, 4 * odd + 4), *range(8 + 4 * odd, 12 + 4 * odd)]
                word = 4 * (2 * half + odd) + j
                store(to + four_bytes * (word // 4) + word_bytes * j, shuffle(front, [*quarter, *(16 + i for i in quarter)], back))


def filled(x: Value) -> Value:
    """A whole line that starts with x and goes on with zeros: a line must be stored at once, or loading it waits for its pieces."""
    while x.type.lanes < 16:
        x = join(x, constant(x.type, 0))
    return x


@jit.inner
def transpose_rows(staged, n_lines, to):  # type: ignore[no-untyped-def]
    """Sixteen staged rows of n_lines lines each, one after another, to the columns of one group of rows in a panel."""
    for line in range(n_lines):
        transpose_lines(staged + 64 * line, 64 * n_lines, to + 16 * WORD_BYTES * line, 4 * WORD_BYTES, WORD_BYTES)


def ask_ahead(address: Value, n_bytes: int, share: tuple[int, int] = (0, 1)) -> None:
    """Prefetch what row kernels that read four rows side by side will come to, in the order of addresses: asked for row by row it came in
    half as fast. `share`: which of how many parts of it (unrolled functions only)."""
    part, parts = share
    for line in [line for i, line in enumerate(range(0, n_bytes, 64)) if i * parts // -(-n_bytes // 64) == part]:
        prefetch(address + (FAR_AHEAD + line), 2)
        prefetch(address + (AHEAD + line))


def four_lines(lines: Iterable[Value]) -> Value:
    """Four vectors one behind the other (unrolled functions only)."""
    a, b, c, d = lines
    return join(join(a, b), join(c, d))


def _as_words(x: Value) -> Value:
    return reinterpret(VecType(i32, x.type.lanes * x.type.element.bitwidth // 32), x)


_BY_PARITY = ((0, 2, 4, 6), (1, 3, 5, 7))
# How two vectors become two in which lanes of both stand side by side, at the first and at the second fold.
_SIDES = (_ALTERNATING[2], _BY_PARITY)
# The same where the order of what is added does not matter. A blend is cheapest where registers are narrow, and costs a copy elsewhere.
_ADDED = (_ALTERNATING[1], _ALTERNATING[2]) if wide_registers() else (((0, 1, 6, 7), (2, 3, 4, 5)), _BY_PARITY)


def interleaved(rows: Sequence[Value], folds: int) -> list[list[Value]]:
    """Rows by one (two, four): vectors that hold a few 32-bit lanes of each row side by side, as `merged` sums do (unrolled functions
    only)."""
    groups = [[_as_words(row)] for row in rows]
    for sides in _SIDES[:folds]:
        groups = [
            [_picked(a, b, side) for a, b in zip(one, other, strict=True) for side in sides]
            for one, other in zip(groups[::2], groups[1::2], strict=True)
        ]
    return groups


def merged(rows: Sequence[Value], folds: int, done: int = 0) -> Sequence[Value]:
    """Of each two rows one, `folds` times: their sums side by side, all added that are of one row; `done` times that was done before
    (unrolled functions only)."""
    for sides in _ADDED[done : done + folds]:
        kind = rows[0].type
        words = [_as_words(row) for row in rows]
        parts = [[reinterpret(kind, _picked(a, b, side)) for side in sides] for a, b in zip(words[::2], words[1::2], strict=True)]
        rows = [a + b for a, b in parts]
    return rows


def side_by_side(rows: Sequence[Value], done: int = 0) -> Value:
    """Of each 128 bits of four vectors the sum of their lanes, the four vectors' sums side by side (unrolled functions only)."""
    (total,) = merged(rows, 2 - done, done)
    return total


def across(rows: Sequence[Value], done: int = 0) -> Value:
    """The sum of all lanes of each of four vectors, a vector a lane; exact in integers (unrolled functions only). They may be `merged`
    already, `done` times."""
    total = side_by_side(rows, done)
    while total.type.lanes > 4:
        total = low(total) + high(total)
    return total


@unrolled
def lanes_of(value: Value) -> Value:
    return constant(i64, value.type.lanes)


@jit.inner
def store_lanes(to, value, count):  # type: ignore[no-untyped-def]
    """The first `count` lanes, all if there are fewer."""
    if count >= lanes_of(value):
        store(to, value)
    else:
        for i in range(count):
            store(to + 4 * i, value[i])
