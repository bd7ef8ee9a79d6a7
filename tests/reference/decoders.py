"""What the bytes of every quant block mean, written for reading.

Owns one function an encoding: blocks [n, block_bytes] of uint8 in, values [n, block_values] of float32 out, in the order of the layout
and with nothing shared that would have to be looked up but the 4-bit halves, the K scales and the grids, which are gguf's. It must stay
naive: kernels are held against it, and it is held against gguf's own decoder.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import quants as gguf_quants

from vllm_cpp.quants import ENCODINGS

# The 16 levels of the non-linear 4-bit encodings.
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# Twice the values of a 4-bit float: a sign, two bits of exponent, one of mantissa.
TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12], np.float32)

DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {}


def decode(encoding: str, data: np.ndarray | bytes) -> np.ndarray:
    """Whole blocks of an encoding, as bytes -> their values in a row, f32."""
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    return DECODERS[encoding](raw.reshape(-1, ENCODINGS[encoding].block_bytes)).reshape(-1)


def decoder(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    DECODERS[function.__name__.upper()] = function
    return function


# -- floats
@decoder
def f32(b: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(b).view("<f4")


@decoder
def f64(b: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(b).view("<f8").astype(np.float32)


@decoder
def f16(b: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


@decoder
def bf16(b: np.ndarray) -> np.ndarray:
    """The upper half of a float32."""
    return (np.ascontiguousarray(b).view("<u2").astype(np.uint32) << 16).view(np.float32)


# -- blocks of 32
def halves(qs: np.ndarray) -> np.ndarray:
    """k bytes -> 2k codes of 4 bits: all the low ones, then all the high ones."""
    return np.concatenate([qs & 15, qs >> 4], 1)


def fifth_bits(qh: np.ndarray) -> np.ndarray:
    """4 bytes -> bit j of them, shifted to 16, for j = 0 .. 31."""
    word = np.ascontiguousarray(qh).view("<u4")
    return ((word >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8) << 4


@decoder
def q8_0(b: np.ndarray) -> np.ndarray:
    d, q = f16(b[:, :2]), b[:, 2:].view(np.int8)
    return d * q


@decoder
def q4_0(b: np.ndarray) -> np.ndarray:
    d, q = f16(b[:, :2]), halves(b[:, 2:])
    return d * (q.astype(np.float32) - 8)


@decoder
def q4_1(b: np.ndarray) -> np.ndarray:
    d, m, q = f16(b[:, :2]), f16(b[:, 2:4]), halves(b[:, 4:])
    return d * q + m


@decoder
def q5_0(b: np.ndarray) -> np.ndarray:
    d, q = f16(b[:, :2]), halves(b[:, 6:]) | fifth_bits(b[:, 2:6])
    return d * (q.astype(np.float32) - 16)


@decoder
def q5_1(b: np.ndarray) -> np.ndarray:
    d, m, q = f16(b[:, :2]), f16(b[:, 2:4]), halves(b[:, 8:]) | fifth_bits(b[:, 4:8])
    return d * q + m


@decoder
def iq4_nl(b: np.ndarray) -> np.ndarray:
    d, q = f16(b[:, :2]), halves(b[:, 2:])
    return d * NONLINEAR[q]


@decoder
def mxfp4(b: np.ndarray) -> np.ndarray:
    """One byte of exponent; a half of it is taken because the levels are doubled."""
    d, q = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128), halves(b[:, 1:])
    return d * TWICE_E2M1[q]


# -- blocks of 64 and 128
@decoder
def nvfp4(b: np.ndarray) -> np.ndarray:
    """4 groups of 16 values, each with 8 bytes of codes and a scale of one byte: 4 bits of exponent, 3 of mantissa, unsigned."""
    exponent, mantissa = (b[:, :4] >> 3 & 15).astype(np.int32), (b[:, :4] & 7).astype(np.float32)
    scale = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    scale = np.where(b[:, :4] == 127, 0, scale).astype(np.float32)  # not a number
    return np.concatenate([scale[:, g : g + 1] / 2 * TWICE_E2M1[halves(b[:, 4 + 8 * g : 12 + 8 * g])] for g in range(4)], 1)


@decoder
def q1_0(b: np.ndarray) -> np.ndarray:
    """Bit j is value j's sign."""
    d, bits = f16(b[:, :2]), np.unpackbits(b[:, 2:], axis=1, bitorder="little")
    return np.where(bits == 1, d, -d)


@decoder
def q2_0(b: np.ndarray) -> np.ndarray:
    """Codes of 2 bits that mean -1, 0, 1, 2, four to a byte."""
    d, codes = f16(b[:, :2]), np.stack([b[:, 2:] >> shift & 3 for shift in (0, 2, 4, 6)], 2).reshape(len(b), 64)
    return d * (codes.astype(np.float32) - 1)


# -- blocks of 256
def k_scales(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes -> 8 scales and 8 minimums of 6 bits. The first four of each fill bytes 0 to 7; what is left of their top bits goes to
    the last four, whose low halves share bytes 8 to 11."""
    a, b, c = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], 1)
    minimums = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], 1)
    return scales, minimums


@decoder
def q2_k(b: np.ndarray) -> np.ndarray:
    """16 groups of 16 values with a 4-bit scale and minimum each; codes of 2 bits, 32 values apart in one byte."""
    scales, qs, d, dmin = b[:, :16], b[:, 16:80], f16(b[:, 80:82]), f16(b[:, 82:84])
    out = np.empty((len(b), 256), np.float32)
    for i in range(256):
        half, place, byte = i // 128, i % 128 // 32, i % 32
        code = qs[:, 32 * half + byte] >> (2 * place) & 3
        scale = scales[:, i // 16]
        out[:, i] = d[:, 0] * (scale & 15) * code - dmin[:, 0] * (scale >> 4)
    return out


@decoder
def q3_k(b: np.ndarray) -> np.ndarray:
    """16 groups of 16 values with a signed 6-bit scale; codes of 2 bits, and a third one that is 0 where 4 is to be subtracted."""
    mask, qs, s, d = b[:, :32], b[:, 32:96], b[:, 96:108], f16(b[:, 108:110])
    out = np.empty((len(b), 256), np.float32)
    for i in range(256):
        half, place, byte, group = i // 128, i % 128 // 32, i % 32, i // 16
        code = (qs[:, 32 * half + byte] >> (2 * place) & 3).astype(np.int32)
        third = mask[:, byte] >> (i // 32) & 1
        low = s[:, group % 8] >> (4 * (group // 8)) & 15
        high = s[:, 8 + group % 4] >> (2 * (group // 4)) & 3
        scale = (low | high << 4).astype(np.int32) - 32
        out[:, i] = d[:, 0] * scale.astype(np.float32) * (code - 4 * (1 - third.astype(np.int32)))
    return out


@decoder
def q4_k(b: np.ndarray) -> np.ndarray:
    """8 groups of 32 values; two groups share 32 bytes, the first in their low halves."""
    d, dmin, (scales, minimums), qs = f16(b[:, :2]), f16(b[:, 2:4]), k_scales(b[:, 4:16]), b[:, 16:]
    out = np.empty((len(b), 8, 32), np.float32)
    for g in range(8):
        code = qs[:, 32 * (g // 2) : 32 * (g // 2) + 32] >> (4 * (g % 2)) & 15
        out[:, g] = d * scales[:, g : g + 1] * code - dmin * minimums[:, g : g + 1]
    return out


@decoder
def q5_k(b: np.ndarray) -> np.ndarray:
    """q4_k with a fifth bit: bit g of byte l belongs to value l of group g."""
    d, dmin, (scales, minimums), qh, qs = f16(b[:, :2]), f16(b[:, 2:4]), k_scales(b[:, 4:16]), b[:, 16:48], b[:, 48:]
    out = np.empty((len(b), 8, 32), np.float32)
    for g in range(8):
        code = (qs[:, 32 * (g // 2) : 32 * (g // 2) + 32] >> (4 * (g % 2)) & 15) | (qh >> g & 1) << 4
        out[:, g] = d * scales[:, g : g + 1] * code - dmin * minimums[:, g : g + 1]
    return out


@decoder
def q6_k(b: np.ndarray) -> np.ndarray:
    """16 groups of 16 values with an int8 scale; 4 low bits and 2 high bits of a code lie apart."""
    ql, qh, scales, d = b[:, :128], b[:, 128:192], b[:, 192:208].view(np.int8), f16(b[:, 208:210])
    out = np.empty((len(b), 256), np.float32)
    for i in range(256):
        half, quarter, byte = i // 128, i % 128 // 32, i % 32
        low = ql[:, 64 * half + 32 * (quarter % 2) + byte] >> (4 * (quarter // 2)) & 15
        high = qh[:, 32 * half + byte] >> (2 * quarter) & 3
        code = (low | high << 4).astype(np.int32) - 32
        out[:, i] = d[:, 0] * scales[:, i // 16] * code
    return out


@decoder
def iq4_xs(b: np.ndarray) -> np.ndarray:
    """8 groups of 32 non-linear codes; a group's 6-bit scale has 4 bits in one place and 2 in another."""
    d, high, low, qs = f16(b[:, :2]), np.ascontiguousarray(b[:, 2:4]).view("<u2"), b[:, 4:8], b[:, 8:]
    out = np.empty((len(b), 8, 32), np.float32)
    for g in range(8):
        scale = (low[:, g // 2] >> (4 * (g % 2)) & 15).astype(np.int32) | (high[:, 0] >> (2 * g) & 3).astype(np.int32) << 4
        out[:, g] = d * (scale - 32).astype(np.float32)[:, None] * NONLINEAR[halves(qs[:, 16 * g : 16 * g + 16])]
    return out


# -- blocks of 256 with trits
@decoder
def tq2_0(b: np.ndarray) -> np.ndarray:
    """Codes of 2 bits that mean -1, 0, 1, 32 values apart in one byte."""
    qs, d = b[:, :64], f16(b[:, 64:])
    codes = [qs[:, 32 * half : 32 * half + 32] >> shift & 3 for half in range(2) for shift in (0, 2, 4, 6)]
    return d * (np.concatenate(codes, 1).astype(np.float32) - 1)


@decoder
def tq1_0(b: np.ndarray) -> np.ndarray:
    """Five trits to a byte, which is the fraction of 256 that has them as its first digits to the base 3; the last 4 bytes hold four."""
    d, trits = f16(b[:, 52:]), []
    for start, stop, n_trits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        fraction = b[:, start:stop]
        for _ in range(n_trits):
            trits.append(fraction.astype(np.int32) * 3 // 256)
            fraction = fraction * np.uint8(3)
    return d * (np.concatenate(trits, 1).astype(np.float32) - 1)


# -- blocks of 256 with points of a grid: 8 values, or 4, for each index
def grid(name: str) -> np.ndarray:
    """[number of points, values] of the encoding with gguf's class of that name."""
    of = getattr(gguf_quants, name)
    of.init_grid()
    return of.grid[0, 0]


def signs(bits: np.ndarray) -> np.ndarray:
    """Sign bytes [n, k] -> [n, 8k] of 1 and -1, the lowest bit first."""
    return 1 - 2 * np.unpackbits(bits, axis=1, bitorder="little").astype(np.float32)


def even_signs(codes: np.ndarray) -> np.ndarray:
    """Sign bytes with 7 bits stored: the eighth makes the number of minuses even."""
    parity = sum(codes >> bit & 1 for bit in range(7)) & 1
    return (codes | parity << 7).astype(np.uint8)


def points(name: str, index: np.ndarray) -> np.ndarray:
    """Indices [n, k] -> the grid's values in a row, [n, values of k points]."""
    return grid(name)[index].reshape(len(index), -1)


def spread(scales: np.ndarray, values: int) -> np.ndarray:
    """Each scale for that many values."""
    return np.repeat(scales.astype(np.float32), values, axis=1)


@decoder
def iq2_xxs(b: np.ndarray) -> np.ndarray:
    """8 groups of 32 values: 4 indices of a byte, then 4 signs of 7 bits and a scale of 4 in a word."""
    d, words = f16(b[:, :2]), np.ascontiguousarray(b[:, 2:]).view("<u4")
    index = np.ascontiguousarray(words[:, 0::2]).view(np.uint8)
    sign = even_signs(np.stack([words[:, 1::2] >> shift & 127 for shift in (0, 7, 14, 21)], 2).reshape(len(b), 32))
    return d / 8 * spread(2 * (words[:, 1::2] >> 28) + 1, 32) * points("IQ2_XXS", index) * signs(sign)


@decoder
def iq2_xs(b: np.ndarray) -> np.ndarray:
    """32 words of an index of 9 bits and a sign of 7; a scale of 4 bits for every 16 values."""
    d, words = f16(b[:, :2]), np.ascontiguousarray(b[:, 2:66]).view("<u2")
    scales = np.stack([b[:, 66:] & 15, b[:, 66:] >> 4], 2).reshape(len(b), 16)
    return d / 8 * spread(2 * scales + 1, 16) * points("IQ2_XS", words & 511) * signs(even_signs(words >> 9))


@decoder
def iq2_s(b: np.ndarray) -> np.ndarray:
    """32 indices of 8 low bits and 2 high bits, with whole sign bytes; a scale of 4 bits for every 16 values."""
    d, low, sign, high = f16(b[:, :2]), b[:, 2:34], b[:, 34:66], b[:, 66:74]
    scales = np.stack([b[:, 74:] & 15, b[:, 74:] >> 4], 2).reshape(len(b), 16)
    high = np.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], 2).reshape(len(b), 32)
    return d / 8 * spread(2 * scales + 1, 16) * points("IQ2_S", low | high.astype(np.int32) << 8) * signs(sign)


@decoder
def iq3_xxs(b: np.ndarray) -> np.ndarray:
    """64 indices of a byte, then for each 32 values a word of 4 signs of 7 bits and a scale of 4."""
    d, index, words = f16(b[:, :2]), b[:, 2:66], np.ascontiguousarray(b[:, 66:]).view("<u4")
    sign = even_signs(np.stack([words >> shift & 127 for shift in (0, 7, 14, 21)], 2).reshape(len(b), 32))
    return d / 4 * spread(2 * (words >> 28) + 1, 32) * points("IQ3_XXS", index) * signs(sign)


@decoder
def iq3_s(b: np.ndarray) -> np.ndarray:
    """64 indices of 8 low bits and, bit by bit elsewhere, a ninth; whole sign bytes; a scale of 4 bits for every 32 values."""
    d, low, high, sign = f16(b[:, :2]), b[:, 2:66], b[:, 66:74], b[:, 74:106]
    scales = np.stack([b[:, 106:] & 15, b[:, 106:] >> 4], 2).reshape(len(b), 8)
    high = np.unpackbits(high, axis=1, bitorder="little")
    return d * spread(2 * scales + 1, 32) * points("IQ3_S", low | high.astype(np.int32) << 8) * signs(sign)


@decoder
def iq1_s(b: np.ndarray) -> np.ndarray:
    """For each 32 values 4 indices of 8 low bits, and a word: 4 x 3 high bits, a scale of 3 bits, and whether all values are moved by
    1/8 down instead of up."""
    d, low, words = f16(b[:, :2]), b[:, 2:34], np.ascontiguousarray(b[:, 34:]).view("<u2")
    high = np.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], 2).reshape(len(b), 32)
    delta = spread(np.where(words >> 15, -1, 1), 32) / 8
    return d * spread(2 * (words >> 12 & 7) + 1, 32) * (points("IQ1_S", low | high.astype(np.int32) << 8) + delta)


@decoder
def iq1_m(b: np.ndarray) -> np.ndarray:
    """For each 8 values an index of 8 low bits and a nibble: 3 high bits and whether the values move down; 4 words, each of 4 scales of 3
    bits for 16 values and of a quarter of the half d."""
    low, nibbles, words = b[:, :32], b[:, 32:48], np.ascontiguousarray(b[:, 48:]).view("<u2")
    d = sum((words[:, i : i + 1] >> 12) << (4 * i) for i in range(4)).astype("<u2").view(np.float16).astype(np.float32)
    scales = np.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], 2).reshape(len(b), 16)
    nibbles = np.stack([nibbles & 15, nibbles >> 4], 2).reshape(len(b), 32)
    delta = spread(np.where(nibbles >> 3, -1, 1), 8) / 8
    return d * spread(2 * scales + 1, 16) * (points("IQ1_M", low | (nibbles & 7).astype(np.int32) << 8) + delta)
