"""TQ1_0: 256 values a block: 52 bytes of trits, f16 d; a value is d * (q - 1).

A byte is the fraction of 256 whose first digits to the base 3 are its trits: times 3, the carry out of the byte is the first, and so on.
Bytes 0..31 hold five trits each, number n belonging to value 32n + i; bytes 32..47 those of the next 80 values in runs of 16; bytes
48..51 four each, of the last 16 values in runs of 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k, q8k_rows, ternary
from vllm_cpp.kernels.simd import high, i8x16, i8x32, join, load, low, opaque, reinterpret, select, shuffle, splat, u8, u32, u32x4
from vllm_cpp.kernels.vectors import Value, VecType, constant

BLOCK_BYTES = 54


def unpack(w: Value) -> Iterator[Value]:
    # fractions are held 128 lower, which tripling (of bytes) keeps, so that signed bytes compare as they do
    long, short = load(i8x32, w) ^ -128, load(i8x16, w + 32) ^ -128
    last = reinterpret(i8x16, splat(u32x4, load(u32, w + 48))) ^ -128
    last = shuffle(last, [*range(4), *range(20, 24)] * 2, _times3(last))
    last = shuffle(last, [*range(8), *range(24, 32)], _times9(last))
    first = join(long, _times3(long))
    yield _first_trit(first)
    second = _times9(first)
    yield _first_trit(second)
    short = join(short, _times3(short))
    fifth = _times9(join(low(second), short))  # of the long run, then the third and fourth of the short
    yield _first_trit(join(low(fifth), short))
    yield _first_trit(join(high(fifth), join(_times9(low(high(fifth))), last)))


def _times3(x: Value) -> Value:
    return x + opaque(x + x)  # or LLVM would multiply bytes, as wider numbers


def _times9(x: Value) -> Value:
    return _times3(_times3(x))


def _first_trit(lowered: Value) -> Value:
    kind = VecType(u8, lowered.type.lanes)
    zero, one, two = (constant(kind, trit) for trit in range(3))
    return select(lowered > 170 - 128, two, select(lowered > 85 - 128, one, zero))


FORM = ternary.form(BLOCK_BYTES, 52, unpack)
dots = q8k_rows.four_dots(FORM, ternary.heads(52), q8k_rows.Quants(unpack))
stage, values = q8k.stage(FORM), q8k.values(FORM)
folded = FORM.folded
pieces = q8k.Tile(FORM)
none, begin, add, end, total = pieces.none, pieces.begin, pieces.add, pieces.end, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    q8k_rows.rows(dots, folded, BLOCK_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    q8k.tile(stage, none, begin, add, end, total, 32, BLOCK_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    q8k.decode(values, BLOCK_BYTES, w, k, out)
