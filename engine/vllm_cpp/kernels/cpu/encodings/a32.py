"""Products of encodings with 32-value blocks and "a32" activations.

Owns the arithmetic order, the same in both kernels and on every CPU: each block's integer sum is exact; it becomes f32 once; blocks add
up in four chains (by place in their quad), each a chain of fused multiply-adds in rising order, and the chains are summed at the end.
Must not know how any encoding packs its blocks: a `Form` says that for four blocks that stand one after another.

A row is cut into quads of four blocks. Where the number of blocks is not a multiple of four, the last quad overlaps the one before it and
the activation record has zeros in place of the blocks already counted (a row under four blocks is padded with zero blocks instead).
`quantize.py` writes the records: 192 bytes a quad: i8[4][16] first halves of the blocks, i8[4][16] second halves, f32[4] d,
f32[4] d * sum as ggml rounds it, i32[4] sum, and 16 bytes nobody writes or reads: so every half that is loaded is one cache line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings.panel import (
    GROUP,
    ROWS,
    WORD_BYTES,
    filled,
    store_lanes,
    transpose_rows,
)
from vllm_cpp.kernels.simd import (
    bit_masks,
    convert,
    dots,
    dots_at_once,
    f32,
    f32x16,
    fma,
    half_to_float,
    i8x64,
    i32,
    i32x16,
    i64,
    join,
    load,
    pack,
    prefetch,
    reinterpret,
    select,
    shuffle,
    signed_offset,
    splat,
    stack_bytes,
    store,
    u8,
    u8x16,
    u8x64,
    u16,
    u16x8,
    u32,
    unrolled,
    unsigned_form,
    zero,
)
from vllm_cpp.kernels.vectors import Value, VecType, constant

BLOCK = 32
QUAD = 4
RECORD = 192
SECOND, SCALES, SUMS_SCALED, SUMS = 64, 128, 144, 160  # where parts of a record start
LINES = 3  # lines of a staged quad: first halves, second halves, scales
COLUMN_BYTES = LINES * 16 * WORD_BYTES  # a panel's quad
STAGED_BYTES = LINES * 64 * GROUP
ACTS = 4  # activation rows a tile kernel works on at once
CHAIN_BYTES = 2 * ACTS * ROWS * 4  # the kept sums of one chain


@dataclass(frozen=True)
class Form:
    """How an encoding's blocks unpack. A value is d * (q - offset), or with `minimum` d * q + m; `largest` bounds every q; four blocks are
    `quad_bytes` long.

    quants(address of four blocks) -> (first, second): bytes x64 with q of values 0..15 of each block and of values 16..31, u8, or i8 with
    `signed`. scales(addresses of what stands at `places` of a quad) -> f32 vectors with the d of each, and with `minimum` the m.
    """

    quad_bytes: int
    quants: Callable[[Value], tuple[Value, Value]]
    scales: Callable[[Sequence[Value]], tuple[Value, ...]]
    places: Sequence[int]
    largest: int = 127
    offset: int = 0
    minimum: bool = False
    signed: bool = False

    def unpacked(self, w: Value) -> tuple[Value, Value, Value]:
        """The quants as they are multiplied, and f32x4 of each block's d, or with `minimum` f32x8 of each d and then each m."""
        first, second = self.multiplied(w)
        return first, second, functools.reduce(join, self.scales([w + at for at in self.places]))

    def multiplied(self, w: Value) -> tuple[Value, Value]:
        first, second = self.quants(w)
        return (unsigned_form(first), unsigned_form(second)) if self.signed else (first, second)

    @property
    def dot_offset(self) -> int:
        return signed_offset() if self.signed else self.offset


def places(block_bytes: int) -> list[int]:
    """Of four blocks with a scale each."""
    return [block_bytes * b for b in range(QUAD)]


def half_scales(addresses: Sequence[Value]) -> tuple[Value]:
    """An f16 at each address."""
    return (half_to_float(pack([load(u16, address) for address in addresses])),)


def two_half_scales(addresses: Sequence[Value]) -> tuple[Value, Value]:
    """Two f16 at each address."""
    halves = reinterpret(VecType(u16, 2 * len(addresses)), pack([load(u32, address) for address in addresses]))
    return tuple(half_to_float(shuffle(halves, range(of, halves.type.lanes, 2))) for of in range(2))


def byte_quad(w: Value, offset: int, block_bytes: int, kind: object = u8x16) -> Value:
    """16 bytes at `offset` of each of four blocks, side by side."""
    parts = [load(kind, w + (offset + block_bytes * b)) for b in range(QUAD)]
    return join(join(parts[0], parts[1]), join(parts[2], parts[3]))


def nibbles(w: Value, offset: int, block_bytes: int) -> tuple[Value, Value]:
    """The low and the high four bits of each block's 16 bytes at `offset`."""
    packed = byte_quad(w, offset, block_bytes)
    return packed & 15, packed >> 4


def fifth_bits(w: Value, offset: int, block_bytes: int) -> tuple[Value, Value]:
    """16 where a value's bit is set in the u32 at `offset` of its block, for first and second halves."""
    words = reinterpret(u16x8, pack([load(u32, w + (offset + block_bytes * b)) for b in range(QUAD)]))
    masks = bit_masks(words, [(0, 2, 4, 6), (1, 3, 5, 7)])
    first, second = (select(mask, constant(u8x64, 16), constant(u8x64, 0)) for mask in masks)
    return first, second


def stage(form: Form) -> Callable:
    """Unpack one quad of one row to the lines of a panel, and ask for the one `ahead` bytes later: the same row of the next panel."""

    def stage_quad(w: Value, ahead: Value, to: Value) -> None:
        for line in range(0, form.quad_bytes, 64):
            prefetch(w + ahead + line, 2)
        first, second, scales = form.unpacked(w)
        for line, vector in enumerate((first, second, filled(scales))):
            store(to + 64 * line, vector)

    return unrolled(stage_quad)


def values(form: Form) -> Callable:
    """Decode the first of four blocks to f32."""

    def block_values(w: Value, out: Value) -> None:
        scales = functools.reduce(join, form.scales([w + at for at in form.places]))
        for half, q in enumerate(form.quants(w)):
            whole = convert(i32x16, shuffle(q, range(16)))
            x = convert(f32x16, whole - form.offset) * splat(f32x16, scales[0])
            if form.minimum:
                x = x + splat(f32x16, scales[QUAD])
            store(out + 64 * half, x)

    return unrolled(block_values)


class Tile:
    """The compiled-in pieces of one form's tile kernel. Sums are f32x16 by cell (activation row, group of rows), the m parts last."""

    def __init__(self, form: Form):
        self.form = form
        self.cells = [(a, g) for a in range(ACTS) for g in range(ROWS // GROUP)]
        self.n_sums = len(self.cells) * (2 if form.minimum else 1)
        self.none = unrolled(self._none)
        self.block = unrolled(self._block)
        self.keep = unrolled(self._keep)
        self.total = unrolled(self._total)

    def _none(self) -> tuple[Value, ...]:
        return (zero(f32x16),) * self.n_sums

    def _block(self, sums: tuple[Value, ...], columns: Value, place: Value, *acts: Value) -> tuple[Value, ...]:
        """Add block `place` of a panel's quad times ACTS records."""
        form, sums = self.form, list(sums)
        entries = [act + (SCALES + place * 4) for act in acts]
        scales = columns + (32 * WORD_BYTES + place * WORD_BYTES)
        integers = self._block_integers(columns + place * (4 * WORD_BYTES), [act + place * 16 for act in acts])
        for i, (a, g) in enumerate(self.cells):
            whole = integers[i]
            if form.dot_offset:
                whole = whole - load(i32, entries[a] + (SUMS - SCALES)) * form.dot_offset
            sums[i] = fma(convert(f32x16, whole), load(f32x16, scales + 64 * g) * load(f32, entries[a]), sums[i])
            if form.minimum:
                j = i + len(self.cells)
                sums[j] = fma(load(f32x16, scales + (QUAD * WORD_BYTES + 64 * g)), load(f32, entries[a] + (SUMS_SCALED - SCALES)), sums[j])
        return tuple(sums)

    def _block_integers(self, columns: Value, acts: list[Value]) -> list[Value]:
        form = self.form
        kind = i8x64 if form.signed and not form.dot_offset else u8x64
        words = [(half, word) for half in range(2) for word in range(4)]
        whole = [zero(i32x16) for _ in self.cells]
        for start in range(0, len(words), dots_at_once(form.largest)):
            pairs: list[list] = [[] for _ in self.cells]
            for half, word in words[start : start + dots_at_once(form.largest)]:
                weights = [load(kind, columns + ((16 * half + word) * WORD_BYTES + 64 * g)) for g in range(ROWS // GROUP)]
                same = [reinterpret(i8x64, splat(i32x16, load(i32, act + (SECOND * half + 4 * word)))) for act in acts]
                for i, (a, g) in enumerate(self.cells):
                    pairs[i].append((weights[g], same[a]))
            whole = [dots(t, p, form.largest) for t, p in zip(whole, pairs, strict=True)]
        return whole

    def _keep(self, sums: tuple[Value, ...], chains: Value, place: Value) -> None:
        for i, value in enumerate(sums):
            store(chains + place * CHAIN_BYTES + 64 * i, value)

    def _total(self, chains: Value, cell: Value) -> Value:
        """The finished products of one cell: the four chains' sums, each with its m part, in the order rows() has."""
        parts = []
        for place in range(QUAD):
            at = chains + cell * 64 + CHAIN_BYTES * place
            part = load(f32x16, at)
            parts.append(part + load(f32x16, at + 64 * len(self.cells)) if self.form.minimum else part)
        return (parts[0] + parts[2]) + (parts[1] + parts[3])


def scratch_bytes(k: int) -> int:
    """Bytes of scratch the tile kernels need for rows of k values."""
    return 64 + STAGED_BYTES + QUAD * CHAIN_BYTES + -(-k // (BLOCK * QUAD)) * COLUMN_BYTES


@unrolled
def quad_space() -> Value:
    """Stack space that holds four blocks of any encoding, or their values."""
    return stack_bytes(4 * BLOCK * QUAD)


@jit.inner
def padded(row, n_bytes):  # type: ignore[no-untyped-def]
    """A copy of a row under four blocks, filled up with zero blocks."""
    space = quad_space()
    for i in range(4 * BLOCK * QUAD // 8):
        store(space + 8 * i, i64(0))
    for i in range(n_bytes):
        store(space + i, load(u8, row + i))
    return space


@jit.inner
def tile(stage, none, block, keep, total, quad_bytes, w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    """The tile kernel of every form (see `jit.tile_kernel`); the first five are its `Tile`'s pieces."""
    staged = (scratch + 63) // 64 * 64
    chains = staged + STAGED_BYTES
    columns = chains + QUAD * CHAIN_BYTES
    blocks = k // BLOCK
    n_quads = (blocks + QUAD - 1) // QUAD
    last = (blocks - QUAD) * quad_bytes // QUAD
    for first in range(0, n_rows, ROWS):
        for q in range(n_quads):
            for group in range(0, ROWS, GROUP):
                for i in range(GROUP):
                    row = w + min(first + group + i, n_rows - 1) * stride
                    if last < 0:
                        row = padded(row, blocks * quad_bytes // QUAD)
                    stage(row + max(0, min(q * quad_bytes, last)), ROWS * stride, staged + 64 * LINES * i)
                transpose_rows(staged, LINES, columns + COLUMN_BYTES * q + 4 * group)
        for a in range(0, n_acts, ACTS):
            a0 = load(i64, acts + 8 * a)
            a1 = load(i64, acts + 8 * min(a + 1, n_acts - 1))
            a2 = load(i64, acts + 8 * min(a + 2, n_acts - 1))
            a3 = load(i64, acts + 8 * min(a + 3, n_acts - 1))
            for place in range(QUAD):
                sums = none()
                for q in range(n_quads):
                    at = q * RECORD
                    sums = block(sums, columns + COLUMN_BYTES * q, place, a0 + at, a1 + at, a2 + at, a3 + at)
                keep(sums, chains, place)
            for j in range(min(ACTS, n_acts - a)):
                out = load(i64, outs + 8 * (a + j)) + 4 * first
                for g in range(ROWS // GROUP):
                    store_lanes(out + 64 * g, total(chains, j * (ROWS // GROUP) + g), n_rows - first - GROUP * g)


@jit.inner
def decode(block_values, block_bytes, w, k, out):  # type: ignore[no-untyped-def]
    """The decode kernel of every form (see `jit.decode_kernel`): one block at a time, padded to the four that a form unpacks."""
    for b in range(k // BLOCK):
        block_values(padded(w + b * block_bytes, block_bytes), out + 4 * BLOCK * b)
