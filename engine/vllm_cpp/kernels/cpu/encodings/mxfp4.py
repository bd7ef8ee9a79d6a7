"""MXFP4: 32 values a block: an exponent byte e, 32 x 4 bits; a value is 2 ** (e - 128) * LEVELS[q].

The levels are twice those of a float with one bit of mantissa (E2M1), hence 128 where the exponent's bias is 127.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import a32, a32_rows
from vllm_cpp.kernels.simd import convert, f32, load, pack, reinterpret, select, table16, u8, u8x16, u32
from vllm_cpp.kernels.vectors import Value, VecType, constant, with_element

BLOCK_BYTES = 17
QUAD_BYTES = a32.QUAD * BLOCK_BYTES
LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
OFFSET = 12  # makes every level an unsigned byte, which multiplies in one step


def levels(index: Value) -> Value:
    """LEVELS[index] + OFFSET."""
    return table16(constant(u8x16, [level + OFFSET for level in LEVELS]), index)


def quants(w: Value) -> tuple[Value, Value]:
    first, second = (levels(index) for index in a32.nibbles(w, 1, BLOCK_BYTES))
    return first, second


def scales(addresses: Sequence[Value]) -> tuple[Value]:
    kind = VecType(u32, len(addresses))
    exponents = convert(kind, pack([load(u8, address) for address in addresses]))
    # the two lowest are below the smallest normal number
    bits = select(exponents < 2, constant(kind, 0x00200000) << exponents, (exponents - 1) << 23)
    return (reinterpret(with_element(kind, f32), bits),)


FORM = a32.Form(QUAD_BYTES, quants, scales, a32.places(BLOCK_BYTES), largest=2 * OFFSET, offset=OFFSET)
dot, stage, values = a32_rows.dot(FORM), a32.stage(FORM), a32.values(FORM)
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
    a32.decode(values, BLOCK_BYTES, w, k, out)
