"""Q2_0: 64 values a block: f16 d, 16 bytes of 2 bits, the first value lowest; a value is d * (q - 1)."""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import a32, a32_rows, wide
from vllm_cpp.kernels.simd import f32, f32x4, join, load, load_half, reinterpret, repeat, shuffle, splat, u8x16, u8x64, u16x32, u32x8
from vllm_cpp.kernels.vectors import Value, constant

BLOCK, BLOCK_BYTES = 64, 18
QUAD_BYTES = 2 * BLOCK_BYTES


def quants_of_two(w: Value, other: Value) -> tuple[Value, Value]:
    """Two blocks as a quad."""
    words = reinterpret(u32x8, join(load(u8x16, w + 2), load(u8x16, other + 2)))  # each holds half of a quad's block
    first, second = (_pairs_of_bits(reinterpret(u8x16, shuffle(words, range(half, 8, 2)))) for half in range(2))
    return first, second


def _pairs_of_bits(packed: Value) -> Value:
    runs = reinterpret(u16x32, repeat(packed, 4)) >> constant(u16x32, [2 * (i // 8) for i in range(32)])
    # run r holds value r of every byte
    return shuffle(reinterpret(u8x64, runs) & 3, [16 * r + i for i in range(16) for r in range(4)])


def quants(w: Value) -> tuple[Value, Value]:
    return quants_of_two(w, w + BLOCK_BYTES)


def unpack_one(w: Value) -> tuple[Value, Value, Value]:
    return *quants_of_two(w, w), splat(f32x4, load_half(f32, w))


FORM = a32.Form(QUAD_BYTES, quants, a32.half_scales, [0, 0, BLOCK_BYTES, BLOCK_BYTES], largest=3, offset=1)
dot, stage, values = a32_rows.dot(FORM), a32.stage(FORM), wide.values(unpack_one, BLOCK, 1)
pieces = a32.Tile(FORM)
none, block, keep, total = pieces.none, pieces.block, pieces.keep, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    a32_rows.rows(dot, False, QUAD_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    a32.tile(stage, none, block, keep, total, QUAD_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    wide.decode(values, BLOCK, BLOCK_BYTES, w, k, out)
