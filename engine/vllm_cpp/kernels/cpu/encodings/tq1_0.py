"""TQ1_0: 256 values a block: 52 bytes of trits, f16 d; a value is d * (q - 1).

A byte is the fraction of 256 whose first digits to the base 3 are its trits: times 3, the carry out of the byte is the first, and so on.
Bytes 0..31 hold five trits each, number n belonging to value 32n + i; bytes 32..47 those of the next 80 values in runs of 16; bytes
48..51 four each, of the last 16 values in runs of 4.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import q8k, ternary
from vllm_cpp.kernels.simd import high, join, load, low, opaque, reinterpret, select, splat, u8x16, u8x32, u32, u32x4
from vllm_cpp.kernels.vectors import Value, constant

BLOCK_BYTES = 54


def unpack(w: Value) -> list[Value]:
    long, short = load(u8x32, w), load(u8x16, w + 32)
    last = reinterpret(u8x16, splat(u32x4, load(u32, w + 48))) * constant(u8x16, [3 ** (i // 4) for i in range(16)])
    last = opaque(last)  # or LLVM would multiply it and what it is joined to again, as wider numbers
    first = join(long, _times3(long))
    second = _times9(first)
    short = join(short, _times3(short))
    fifth = _times9(join(low(second), short))  # of the long run, then the third and fourth of the short
    fourth = join(high(fifth), join(_times9(low(high(fifth))), last))
    return [_first_trit(fraction) for fraction in (first, second, join(low(fifth), short), fourth)]


def _times3(x: Value) -> Value:
    return x + x + x


def _times9(x: Value) -> Value:
    return _times3(_times3(x))


def _first_trit(fraction: Value) -> Value:
    zero, one, two = (constant(fraction.type, trit) for trit in range(3))
    return select(fraction >= 171, two, select(fraction >= 86, one, zero))


FORM = ternary.form(BLOCK_BYTES, 52, unpack)
dot, finish, stage, values = ternary.dot(FORM), q8k.finish(FORM), q8k.stage(FORM), q8k.values(FORM)
pieces = q8k.Tile(FORM)
none, begin, add, end, total = pieces.none, pieces.begin, pieces.add, pieces.end, pieces.total


@jit.row_kernel
def rows(w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    q8k.rows(dot, finish, BLOCK_BYTES, w, stride, n_rows, k, act, out)


@jit.tile_kernel
def tile(w, stride, n_rows, k, acts, n_acts, outs, scratch):  # type: ignore[no-untyped-def]
    q8k.tile(stage, none, begin, add, end, total, 32, BLOCK_BYTES, w, stride, n_rows, k, acts, n_acts, outs, scratch)


@jit.decode_kernel
def decode(w, k, out):  # type: ignore[no-untyped-def]
    q8k.decode(values, BLOCK_BYTES, w, k, out)
