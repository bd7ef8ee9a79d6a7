"""Products of encodings without blocks: weights become f32 and meet f32 activations.

Owns the arithmetic order, the same in both kernels: value i of a row goes to chain i modulo 32, each chain fused multiply-adds in rising
order; the chains are summed by halves, and what does not fill 32 values is added after them, one by one. Must not know formats: a `load`
gives n numbers as f32.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings.panel import AHEAD, GROUP, ROWS, WORD_BYTES, store_lanes, transpose_lines
from vllm_cpp.kernels.simd import f32, f32x16, fma, hsum, i64, load, prefetch, store, unrolled, zero
from vllm_cpp.kernels.vectors import Value

CHAINS = 32
ACTS = 4
CELLS = [(a, g) for a in range(ACTS) for g in range(ROWS // GROUP)]
CHAIN_BYTES = len(CELLS) * 64  # the kept sums of one chain
STAGED_BYTES = 4 * CHAINS * GROUP


def dot(load_floats: Callable, value_bytes: int) -> Callable:
    """Add 32 values of a weight row times 32 activations to two vectors of chains."""

    def dot_32(totals: tuple[Value, Value], w: Value, act: Value) -> tuple[Value, Value]:
        for line in range(0, CHAINS * value_bytes, 64):
            prefetch(w + (AHEAD + line))
        halves = [(load_floats(f32x16, w + 16 * value_bytes * h), load(f32x16, act + 64 * h)) for h in range(2)]
        return tuple(fma(x, y, total) for total, (x, y) in zip(totals, halves, strict=True))

    return unrolled(dot_32)


def stage(load_floats: Callable, value_bytes: int) -> Callable:
    """32 values of one row as two lines."""

    def stage_32(w: Value, to: Value) -> None:
        for half in range(2):
            store(to + 64 * half, load_floats(f32x16, w + 16 * value_bytes * half))

    return unrolled(stage_32)


@unrolled
def none() -> tuple[Value, ...]:
    return (zero(f32x16),) * len(CELLS)


@unrolled
def add_column(sums: tuple[Value, ...], column: Value, *acts: Value) -> tuple[Value, ...]:
    """Add one column of a panel (one value of every row) times one value of each activation row."""
    weights = [load(f32x16, column + 64 * g) for g in range(ROWS // GROUP)]
    same = [load(f32, act) for act in acts]
    return tuple(fma(weights[g], same[a], s) for s, (a, g) in zip(sums, CELLS, strict=True))


@unrolled
def keep(sums: tuple[Value, ...], to: Value) -> None:
    for i, value in enumerate(sums):
        store(to + 64 * i, value)


@unrolled
def chains_total(chains: Value) -> tuple[Value, ...]:
    """Every cell's chains, summed in the order rows() has."""
    return tuple(_by_halves([load(f32x16, chains + (CHAIN_BYTES * c + 64 * i)) for c in range(CHAINS)]) for i in range(len(CELLS)))


def _by_halves(parts: list[Value]) -> Value:
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [x + y for x, y in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def scratch_bytes(k: int) -> int:
    """Bytes of scratch the tile kernels need for rows of k values."""
    return 64 + STAGED_BYTES + CHAINS * CHAIN_BYTES + (k + 2 * CHAINS) * WORD_BYTES


@jit.inner
def rows(dot_32, load_floats, value_bytes, w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    """The row kernel of every format (see `jit.row_kernel`)."""
    for r in range(n_rows):
        row = w + r * stride
        totals = (zero(f32x16), zero(f32x16))
        for i in range(0, k - CHAINS + 1, CHAINS):
            totals = dot_32(totals, row + value_bytes * i, act + 4 * i)
        total = hsum(totals[0] + totals[1])
        for i in range(k // CHAINS * CHAINS, k):
            total = fma(load_floats(f32, row + value_bytes * i), load(f32, act + 4 * i), total)
        store(out + 4 * r, total)


@jit.inner
def tile(stage_32, load_floats, value_bytes, w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    """The tile kernel of every format (see `jit.tile_kernel`). A panel stands chain by chain; the values left over are columns at its
    end."""
    staged = (scratch + 63) // 64 * 64
    chains = staged + STAGED_BYTES
    columns = chains + CHAINS * CHAIN_BYTES
    n = k // CHAINS
    chain_columns = (n + 1) * WORD_BYTES  # one column more than used, so that chains do not meet in the same cache sets
    rest = columns + CHAINS * chain_columns
    for first in range(0, n_rows, ROWS):
        for group in range(0, ROWS, GROUP):
            for i in range(n):
                for r in range(GROUP):
                    row = w + min(first + group + r, n_rows - 1) * stride
                    stage_32(row + CHAINS * value_bytes * i, staged + 4 * CHAINS * r)
                for half in range(2):
                    to = columns + WORD_BYTES * i + 4 * group + half * GROUP * chain_columns
                    transpose_lines(staged + 64 * half, 4 * CHAINS, to, 4 * chain_columns, chain_columns)
            for i in range(n * CHAINS, k):
                for r in range(GROUP):
                    row = w + min(first + group + r, n_rows - 1) * stride
                    store(rest + WORD_BYTES * (i - n * CHAINS) + 4 * (group + r), load_floats(f32, row + value_bytes * i))
        for a in range(0, n_acts, ACTS):
            a0 = load(i64, acts + 8 * a)
            a1 = load(i64, acts + 8 * min(a + 1, n_acts - 1))
            a2 = load(i64, acts + 8 * min(a + 2, n_acts - 1))
            a3 = load(i64, acts + 8 * min(a + 3, n_acts - 1))
            for c in range(CHAINS):
                sums = none()
                column = columns + c * chain_columns
                for i in range(c, c + n * CHAINS, CHAINS):
                    sums = add_column(sums, column, a0 + 4 * i, a1 + 4 * i, a2 + 4 * i, a3 + 4 * i)
                    column += WORD_BYTES
                keep(sums, chains + CHAIN_BYTES * c)
            sums = chains_total(chains)
            for i in range(n * CHAINS, k):
                sums = add_column(sums, rest + WORD_BYTES * (i - n * CHAINS), a0 + 4 * i, a1 + 4 * i, a2 + 4 * i, a3 + 4 * i)
            keep(sums, chains)
            for j in range(min(ACTS, n_acts - a)):
                out = load(i64, outs + 8 * (a + j)) + 4 * first
                for g in range(ROWS // GROUP):
                    store_lanes(out + 64 * g, load(f32x16, chains + 64 * (j * (ROWS // GROUP) + g)), n_rows - first - GROUP * g)


@jit.inner
def decode(load_floats, value_bytes, w, k, out):  # type: ignore[no-untyped-def]
    """The decode kernel of every format (see `jit.decode_kernel`)."""
    for i in range(k):
        store(out + 4 * i, load_floats(f32, w + value_bytes * i))
