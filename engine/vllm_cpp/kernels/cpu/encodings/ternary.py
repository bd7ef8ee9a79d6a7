"""Row products of the ternary encodings: superblocks without scales of their own.

Owns the dot of one block with a "q8k" activation block: the same integer as `q8k.py` computes with scales of 1, and the same f32 steps
after it, so that its tile kernel agrees bit for bit. Must not know how a block packs its trits: `unpack(address)` gives q8k's four byte
vectors of 0, 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_cpp.kernels.cpu.encodings import q8k
from vllm_cpp.kernels.cpu.encodings.panel import AHEAD
from vllm_cpp.kernels.simd import (
    convert,
    dot_i16,
    dots,
    f32,
    f32x4,
    fma,
    high,
    i8x64,
    i16x16,
    i32x8,
    i32x16,
    load,
    load_half,
    low,
    prefetch,
    shuffle,
    splat,
    unrolled,
    zero,
)
from vllm_cpp.kernels.vectors import Value, constant

LARGEST = 3  # the highest code of two bits: not valid, yet decodable


def form(block_bytes: int, d_at: int, unpack: Callable[[Value], list[Value]]) -> q8k.Form:
    """With scales of 1 and an f16 d at byte `d_at`."""

    def unpack_block(w: Value) -> tuple[list[Value], Value, None, Value]:
        return unpack(w), constant(i16x16, 1), None, splat(f32x4, load_half(f32, w + d_at))

    return q8k.Form(block_bytes, unpack_block, largest=LARGEST, sub=32, zero=1)


def dot(form: q8k.Form) -> Callable:
    """`q8k.dot` for scales of 1."""

    def block_dot(total: Value, w: Value, quants: Value, sums: Value, d: Value) -> Value:
        for line in range(0, form.block_bytes, 64):
            prefetch(w + (AHEAD + line))
        unpacked, ones, _, weight_d = form.unpacked(w)
        whole = dots(zero(i32x16), [(q, load(i8x64, quants + 64 * j)) for j, q in enumerate(unpacked)], LARGEST)
        whole = low(whole) + high(whole) - dot_i16(zero(i32x8), ones, load(i16x16, sums))
        whole = low(whole) + high(whole)
        for swap in (2, 1):
            whole = whole + shuffle(whole, [lane ^ swap for lane in range(4)])
        return fma(convert(f32x4, whole), weight_d * load(f32, d), total)

    return unrolled(block_dot)
