"""Random but valid quant blocks of every encoding.

Owns what a valid block looks like: random quant bits, scales of a sensible size. Nothing is quantized from floats, so every path of a
decoder is walked and no quantizer has to be trusted. The order of the draws is part of the recordings: a changed order changes the bytes
of every model, and tests compare their sha256.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_cpp.quants import ENCODINGS

# Standard deviation of the decoded values of random blocks whose outer scale is 1, measured with a decoder.
UNIT_STD = {
    "Q4_0": 4.76, "Q4_1": 4.82, "Q5_0": 9.47, "Q5_1": 9.63, "Q8_0": 75.5,
    "Q2_K": 14.2, "Q3_K": 44.4, "Q4_K": 265.0, "Q5_K": 539.0, "Q6_K": 1395.0,
    "IQ1_S": 7.34, "IQ1_M": 7.39, "IQ2_XXS": 54.6, "IQ2_XS": 57.0, "IQ2_S": 57.9, "IQ3_XXS": 145.5, "IQ3_S": 143.3,
    "IQ4_NL": 69.2, "IQ4_XS": 1276.0, "TQ1_0": 0.837, "TQ2_0": 0.837, "MXFP4": 6.51, "NVFP4": 5.89, "Q1_0": 1.02, "Q2_0": 1.03,
}  # fmt: skip


def half(x: np.ndarray) -> np.ndarray:
    """[n] -> the bytes of n halves, [n, 2]."""
    return np.ascontiguousarray(x.astype(np.float32).astype("<f2")).view(np.uint8).reshape(-1, 2)


class _Draw:
    """The values one batch of blocks starts from: a scale and a sign each, then bits on demand."""

    def __init__(self, n: int, unit: float, rng: np.random.Generator) -> None:
        self.n, self.rng = n, rng
        self.d = unit * rng.uniform(0.6, 1.4, n)
        # Real quantizers emit negative scales for some symmetric types. Drawn for all, used by some.
        self.signed = self.d * rng.choice(np.array([-1.0, 1.0]), n)

    def bits(self, size: int) -> np.ndarray:
        return self.rng.integers(0, 256, (self.n, size), np.uint8)

    def int8(self, size: int) -> np.ndarray:
        return self.rng.integers(-127, 128, (self.n, size), np.int8).view(np.uint8)


_PARTS: dict[str, Callable[[_Draw], list[np.ndarray]]] = {
    "Q8_0": lambda r: [half(r.d), r.int8(32)],
    "Q4_0": lambda r: [half(r.signed), r.bits(16)],
    "IQ4_NL": lambda r: [half(r.signed), r.bits(16)],
    "Q5_0": lambda r: [half(r.signed), r.bits(4), r.bits(16)],
    "Q4_1": lambda r: [half(r.d), half(-7.5 * r.d * r.rng.uniform(0.8, 1.2, r.n)), r.bits(16)],
    "Q5_1": lambda r: [half(r.d), half(-15.5 * r.d * r.rng.uniform(0.8, 1.2, r.n)), r.bits(4), r.bits(16)],
    "Q2_K": lambda r: [r.bits(16), r.bits(64), half(r.d), half(1.5 * r.d)],
    "Q3_K": lambda r: [r.bits(32), r.bits(64), r.bits(12), half(r.signed)],
    "Q4_K": lambda r: [half(r.d), half(7.5 * r.d), r.bits(12), r.bits(128)],
    "Q5_K": lambda r: [half(r.d), half(15.5 * r.d), r.bits(12), r.bits(32), r.bits(128)],
    "Q6_K": lambda r: [r.bits(128), r.bits(64), r.int8(16), half(r.signed)],
    "TQ1_0": lambda r: [_trits(r), half(r.d)],
    "TQ2_0": lambda r: [_pairs(r.rng.integers(0, 3, (r.n, 64, 4)).astype(np.uint8)), half(r.d)],
    # codes mean -1, 0, 1, 2; the odds make them average to nothing
    "Q2_0": lambda r: [half(r.d), _pairs(r.rng.choice(np.arange(4, dtype=np.uint8), (r.n, 16, 4), p=[0.4, 0.3, 0.2, 0.1]))],
    # one byte e of scale, 2^(e - 128) for doubled 4-bit floats
    "MXFP4": lambda r: [(np.round(np.log2(r.d)) + 128).astype(np.uint8)[:, None], r.bits(16)],
    "NVFP4": lambda r: [_ue4m3(2 * r.d[:, None] * r.rng.uniform(0.6, 1.4, (r.n, 4))), r.bits(32)],
    "IQ1_M": lambda r: _after_scales(r, _spread_half(r)),
}


def random_blocks(encoding: str, n: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """n valid blocks as [n, block_bytes], whose decoded values have about the given standard deviation."""
    size = ENCODINGS[encoding].block_bytes
    draw = _Draw(n, std / UNIT_STD[encoding], rng)
    # The others lead with a half scale, and any pattern of the remaining bits is valid.
    parts = _PARTS[encoding](draw) if encoding in _PARTS else [half(draw.d), draw.bits(size - 2)]
    return np.concatenate(parts, 1)


def _after_scales(draw: _Draw, scales: np.ndarray) -> list[np.ndarray]:
    """IQ1_M stores its scales last, but draws them first."""
    return [draw.bits(32), draw.bits(16), scales]


def _pairs(codes: np.ndarray) -> np.ndarray:
    """[n, k, 4] two-bit codes -> [n, k] bytes, the first code lowest."""
    return codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6


def _trits(draw: _Draw) -> np.ndarray:
    """48 bytes of five trits and 4 of four, each stored as a fraction of 256 rounded up."""
    five = draw.rng.integers(0, 243, (draw.n, 48))
    four = 3 * draw.rng.integers(0, 81, (draw.n, 4))
    return ((np.concatenate([five, four], 1) * 256 + 242) // 243).astype(np.uint8)


def _ue4m3(want: np.ndarray) -> np.ndarray:
    """Positive numbers -> unsigned 8-bit floats (4 bits of exponent, 3 of mantissa), rounded down, never 0."""
    exponent = np.clip(np.floor(np.log2(want)), -6, 8)
    mantissa = np.floor((want / 2.0**exponent - 1) * 8)
    subnormal = np.maximum(1, np.round(want * 512))
    return np.where(mantissa >= 0, (exponent + 7) * 8 + mantissa, subnormal).astype(np.uint8)


def _spread_half(draw: _Draw) -> np.ndarray:
    """Four uint16 of random scales, whose top nibbles hold a half between them, the lowest nibble first."""
    whole = draw.d.astype(np.float32).astype("<f2").view(np.uint16)
    scales = draw.rng.integers(0, 4096, (draw.n, 4)).astype(np.uint16)
    for k in range(4):
        scales[:, k] |= ((whole >> (4 * k)) & 15).astype(np.uint16) << 12
    return scales.astype("<u2").view(np.uint8).reshape(draw.n, 8)
