"""What the bytes of every quant block mean, written for reading.

Owns one function an encoding: blocks [n, block_bytes] of uint8 in, values [n, block_values] of float32 out, in the order of the layout
and with nothing shared that would have to be looked up but the 4-bit halves and the K scales. It must stay naive: kernels are held
against it, and it is held against gguf's own decoder.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_cpp.quants import ENCODINGS

# The 16 levels of the non-linear 4-bit encodings.
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)

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
