"""Q1_0: 128 values a block: f16 d, 16 bytes of bits, the first value lowest; a value is d where its bit is set, else -d."""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import a32, wide
from vllm_cpp.kernels.simd import bit_mask, f32, f32x4, load, load_half, select, shuffle, splat, u8x64, u16x8
from vllm_cpp.kernels.vectors import Value, constant

BLOCK, BLOCK_BYTES = 128, 18  # a block is a whole quad


def unpack(w: Value) -> tuple[Value, Value, Value]:
    bits = load(u16x8, w + 2)
    first, second = (select(bit_mask(shuffle(bits, range(half, 8, 2))), constant(u8x64, 2), constant(u8x64, 0)) for half in range(2))
    return first, second, splat(f32x4, load_half(f32, w))


FORM = a32.Form(BLOCK_BYTES, unpack, largest=2, offset=1)
dot, stage, values = a32.dot(FORM), a32.stage(FORM), wide.values(unpack, BLOCK, 1)
pieces = a32.Tile(FORM)
none, block, keep, total = pieces.none, pieces.block, pieces.keep, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    a32.rows(dot, False, BLOCK_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    a32.tile(stage, none, block, keep, total, BLOCK_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    wide.decode(values, BLOCK, BLOCK_BYTES, w, k, out)
