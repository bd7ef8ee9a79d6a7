"""Activations in the forms that weight encodings multiply with.

Owns the four layouts of an activation row and the kernels that write them from f32. The numbers are those ggml uses, so that results
agree with llama.cpp to rounding; their places in memory are ours, chosen so that the row and tile kernels load whole vectors. Must not
know any weight encoding.

- "f32": f32[k], as it is.
- "bf16": f32 rounded to the nearest number that its upper half can hold, ties to even; that half alone where the CPU multiplies such.
- "a32": int8 blocks of 32 in quads, see `encodings/a32.py`. d = largest |x| / 127 rounded through f16, q = x * (127 / largest |x|)
  rounded half to even.
- "q8k": int8 blocks of 256, see `encodings/q8k.py`. The scale makes the largest |x| (the first, if several) -127.
"""

from __future__ import annotations

import functools

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.encodings import a32, bf16, q8k
from vllm_cpp.kernels.simd import (
    absolute,
    convert,
    f32,
    f32x16,
    hmax,
    hsum,
    i8x16,
    i16,
    i32,
    i32x16,
    i64,
    load,
    maximum,
    nearest,
    round_bfloat,
    round_half,
    select,
    store,
    store_bfloat,
    unrolled,
    zero,
)
from vllm_cpp.kernels.vectors import Value, constant

LAYOUTS = ("f32", "bf16", "a32", "q8k")  # a record names a layout by its place here
_F32, _BF16, _A32, _Q8K = range(len(LAYOUTS))

PIECE = a32.BLOCK * a32.QUAD  # values that one thread takes at least

FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "k",  # f32 rows; bytes between two; values a row
    "out", "out_stride",  # rows in the layout
    "layout",
)  # fmt: skip


def activation_row_bytes(layout: str, k: int) -> int:
    """Bytes of one activation row of k values; whole cache lines for the quantized layouts."""
    if layout == "f32":
        return 4 * k
    if layout == "bf16":
        return -(-k * bf16.ACT_BYTES // 64) * 64
    if layout == "a32":
        return a32.RECORD * -(-k // (a32.BLOCK * a32.QUAD))
    if layout == "q8k":
        return q8k.row_bytes(k)
    raise KeyError(f"no activation layout {layout!r}; there are {', '.join(LAYOUTS)}")


@unrolled
def a32_block(x: Value, record: Value, place: Value) -> None:
    """32 values to one place of a record."""
    halves = [load(f32x16, x), load(f32x16, x + 64)]
    largest = hmax(maximum(absolute(halves[0]), absolute(halves[1])))
    factor = select(largest > 0.0, constant(f32, 127.0) / largest, constant(f32, 0.0))
    d = largest / 127.0
    whole = [convert(i32x16, nearest(half * factor)) for half in halves]
    total = hsum(whole[0] + whole[1])
    for half, at in zip(whole, (0, a32.SECOND), strict=True):
        store(record + at + place * 16, convert(i8x16, half))
    # The scaled sum goes through f16 as in ggml's Q8_1: with the exact one, a near tie between experts can fall the other way.
    _a32_scales(record, place, round_half(d), round_half(d * convert(f32, total)), total)


@unrolled
def a32_no_block(record: Value, place: Value) -> None:
    """A place whose block is counted elsewhere, or that the row does not have."""
    for at in (0, a32.SECOND):
        store(record + at + place * 16, zero(i8x16))
    _a32_scales(record, place, constant(f32, 0), constant(f32, 0), constant(i32, 0))


def _a32_scales(record: Value, place: Value, d: Value, scaled_total: Value, total: Value) -> None:
    entry = record + a32.SCALES + place * 4
    store(entry, d)
    store(entry + (a32.SUMS_SCALED - a32.SCALES), scaled_total)
    store(entry + (a32.SUMS - a32.SCALES), total)


@jit.inner
def quantize_a32_range(x, k, out, first, last):  # type: ignore[no-untyped-def]
    """Quads first .. last - 1 of one row."""
    blocks = k // a32.BLOCK
    for q in range(first, last):
        start = max(0, min(q * a32.QUAD, blocks - a32.QUAD))
        for place in range(a32.QUAD):
            block = start + place
            if q * a32.QUAD <= block < blocks:
                a32_block(x + 4 * a32.BLOCK * block, out + a32.RECORD * q, place)
            else:
                a32_no_block(out + a32.RECORD * q, place)


@jit.inner
def quantize_a32(x, k, out):  # type: ignore[no-untyped-def]
    quantize_a32_range(x, k, out, 0, (k + a32.BLOCK * a32.QUAD - 1) // (a32.BLOCK * a32.QUAD))


@unrolled
def q8k_largest(x: Value) -> Value:
    parts = [absolute(load(f32x16, x + 64 * i)) for i in range(16)]
    return hmax(functools.reduce(maximum, parts))


@unrolled
def q8k_block(x: Value, factor: Value, quants: Value, sums: Value) -> None:
    for i in range(16):
        whole = convert(i32x16, nearest(load(f32x16, x + 64 * i) * factor))
        whole = select(whole < 127, whole, constant(i32x16, 127))
        store(quants + 16 * i, convert(i8x16, whole))
        store(sums + 2 * i, convert(i16, hsum(whole)))


@jit.inner
def quantize_q8k_range(x, k, out, first, last):  # type: ignore[no-untyped-def]
    """Blocks first .. last - 1 of one row."""
    sums = out + q8k.sums_at(k)
    scales = out + q8k.scales_at(k)
    for b in range(first, last):
        at = x + 4 * q8k.BLOCK * b
        largest = q8k_largest(at)
        factor = f32(0)
        d = f32(0)
        if largest > 0:
            signed = load(f32, at)
            i = 0
            while abs(signed) != largest:
                i += 1
                signed = load(f32, at + 4 * i)
            factor = f32(-127) / signed
            d = f32(1) / factor
        q8k_block(at, factor, out + q8k.BLOCK * b, sums + 32 * b)
        store(scales + 4 * b, d)


@jit.inner
def quantize_q8k(x, k, out):  # type: ignore[no-untyped-def]
    quantize_q8k_range(x, k, out, 0, k // q8k.BLOCK)


@unrolled
def store_rounded(to: Value, x: Value) -> None:
    """f32 numbers as a bf16 activation row has them."""
    if bf16.MULTIPLIES_PAIRS:
        store_bfloat(to, x)
    else:
        store(to, round_bfloat(x))


@jit.inner
def round_to_bfloat(x, out, first, last):  # type: ignore[no-untyped-def]
    """Values first .. last - 1 of one row; `first` is a multiple of 16."""
    for i in range(first, last - 15, 16):
        store_rounded(out + bf16.ACT_BYTES * i, load(f32x16, x + 4 * i))
    for i in range(first + (last - first) // 16 * 16, last):
        store_rounded(out + bf16.ACT_BYTES * i, load(f32, x + 4 * i))


@jit.op
def quantize(args, tid, nth):  # type: ignore[no-untyped-def]
    """out[t] = x[t] in the layout; the pieces of all rows (quads, blocks) are shared out in one run, so few rows keep every thread busy
    too."""
    n = load(i64, load(i64, args))
    x, x_stride, k = load(i64, args + 8), load(i64, args + 16), load(i64, args + 24)
    out, out_stride, layout = load(i64, args + 32), load(i64, args + 40), load(i64, args + 48)
    pieces = k // q8k.BLOCK if layout == _Q8K else (k + PIECE - 1) // PIECE
    stop = n * pieces * (tid + 1) // nth
    at = n * pieces * tid // nth
    while at < stop:
        row, first = at // pieces, at % pieces
        last = min(pieces, first + stop - at)
        if layout == _Q8K:
            quantize_q8k_range(x + row * x_stride, k, out + row * out_stride, first, last)
        elif layout == _BF16:
            round_to_bfloat(x + row * x_stride, out + row * out_stride, first * PIECE, min(k, last * PIECE))
        else:
            quantize_a32_range(x + row * x_stride, k, out + row * out_stride, first, last)
        at += last - first
