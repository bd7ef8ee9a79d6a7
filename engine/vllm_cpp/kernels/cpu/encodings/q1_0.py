"""Q1_0: 128 values a block: f16 d, 16 bytes of bits, the first value lowest; a value is d where its bit is set, else -d."""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import a32, a32_rows, wide
from vllm_cpp.kernels.simd import bit_masks, f32, f32x4, load, load_half, select, splat, u8x64, u16x8
from vllm_cpp.kernels.vectors import Value, constant

BLOCK, BLOCK_BYTES = 128, 18  # a block is a whole quad


def quants(w: Value) -> tuple[Value, Value]:
    masks = bit_masks(load(u16x8, w + 2), [(0, 2, 4, 6), (1, 3, 5, 7)])
    first, second = (select(mask, constant(u8x64, 2), constant(u8x64, 0)) for mask in masks)
    return first, second


def unpack(w: Value) -> tuple[Value, Value, Value]:
    return *quants(w), splat(f32x4, load_half(f32, w))


FORM = a32.Form(BLOCK_BYTES, quants, a32.half_scales, [0] * a32.QUAD, largest=2, offset=1)
dot, stage, values = a32_rows.dot(FORM), a32.stage(FORM), wide.values(unpack, BLOCK, 1)
pieces = a32.Tile(FORM)
none, block, keep, total = pieces.none, pieces.block, pieces.keep, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    a32_rows.rows(dot, False, BLOCK_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    a32.tile(stage, none, block, keep, total, BLOCK_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    wide.decode(values, BLOCK, BLOCK_BYTES, w, k, out)
