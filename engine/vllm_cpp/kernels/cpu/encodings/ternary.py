"""What the ternary encodings share: superblocks without scales of their own.

Owns their form and the heads of four blocks. Must not know how a block packs its trits: `unpack(address)` gives q8k's four byte vectors of
0, 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vllm_cpp.kernels.cpu.encodings import q8k, q8k_rows
from vllm_cpp.kernels.simd import f32, f32x4, half_to_float, i16x16, load, load_half, pack, splat, u16
from vllm_cpp.kernels.vectors import Value, constant

LARGEST = 3  # the highest code of two bits: not valid, yet decodable


def form(block_bytes: int, d_at: int, unpack: Callable[[Value], Iterable[Value]]) -> q8k.Form:
    """With scales of 1 and an f16 d at byte `d_at`."""

    def unpack_block(w: Value) -> tuple[Iterable[Value], Value, None, Value]:
        return unpack(w), constant(i16x16, 1), None, splat(f32x4, load_half(f32, w + d_at))

    return q8k.Form(block_bytes, unpack_block, largest=LARGEST, sub=32, zero=1)


def heads(d_at: int) -> Callable[[Sequence[Value]], q8k_rows.Heads]:
    """Of four blocks with an f16 d at byte `d_at`."""
    return lambda blocks: q8k_rows.Heads(None, None, half_to_float(pack([load(u16, block + d_at) for block in blocks])), None)
