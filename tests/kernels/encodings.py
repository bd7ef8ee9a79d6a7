"""What the encoding kernels are held against, and how tests call them.

Owns naive activation quantizers (numpy, block by block), the naive product in float64 of decoded weights and decoded activations, and
weights that end where readable memory ends. Must not know how a kernel works.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import numpy as np

from tests.reference.decoders import decode
from tests.tiny_models.blocks import random_blocks
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu.encodings.bf16 import ACT_BYTES
from vllm_cpp.kernels.cpu.quantize import LAYOUTS, activation_row_bytes
from vllm_cpp.kernels.cpu.registry import tile_scratch_bytes
from vllm_cpp.quants import ENCODINGS

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass
class Activation:
    """One activation row: its bytes in a layout, the numbers those mean, and by block of 32 how far the scaled sum was rounded."""

    raw: np.ndarray
    values: np.ndarray
    sum_error: np.ndarray


def a32(x: np.ndarray) -> Activation:
    """int8 blocks of 32 in records of four; the last record ends with the row and leaves out what the one before it holds."""
    blocks = x.reshape(-1, 32)
    n = len(blocks)
    raw = aligned_zeros(activation_row_bytes("a32", x.size), np.uint8)
    records = raw.reshape(-1, 192)
    values, error = np.zeros((n, 32)), np.zeros(n)
    for b, block in enumerate(blocks):
        largest = np.abs(block).max()
        d = largest / np.float32(127)
        q = np.rint(block * (np.float32(127) / largest if largest else np.float32(0))).astype(np.int8)
        total = q.sum(dtype=np.int32)
        scaled = np.float32(np.float16(d * np.float32(total)))
        record = records[b // 4]
        place = b - max(0, min(b // 4 * 4, n - 4))
        record[16 * place :][:16] = q[:16].view(np.uint8)
        record[64 + 16 * place :][:16] = q[16:].view(np.uint8)
        for at, number in ((128, np.float32(np.float16(d))), (144, scaled), (160, total)):
            record[at + 4 * place :][:4] = np.array([number]).view(np.uint8)
        values[b] = q * np.float64(np.float16(d))
        error[b] = np.float64(scaled) - values[b].sum()
    return Activation(raw, values.reshape(-1), error)


def q8k(x: np.ndarray) -> Activation:
    """int8 blocks of 256: all quants, then the sums of each 16, then the scales."""
    blocks = x.reshape(-1, 256)
    quants, sums, scales = [], [], []
    for block in blocks:
        largest = block[np.abs(block).argmax()]
        factor = np.float32(-127) / largest if largest else np.float32(0)
        quants.append(np.minimum(np.rint(block * factor), 127).astype(np.int8))
        sums.append(quants[-1].reshape(16, 16).sum(1, dtype=np.int16))
        scales.append(np.float32(1) / factor if largest else np.float32(0))
    raw = aligned_zeros(activation_row_bytes("q8k", x.size), np.uint8)
    packed = np.concatenate([np.array(part).reshape(-1).view(np.uint8) for part in (quants, sums, np.array(scales, np.float32))])
    raw[: packed.size] = packed
    return Activation(raw, (np.array(quants) * np.array(scales, np.float64)[:, None]).reshape(-1), np.zeros(x.size // 32))


def f32(x: np.ndarray) -> Activation:
    raw = aligned_zeros(4 * x.size, np.uint8)
    raw[:] = x.view(np.uint8)
    return Activation(raw, x.astype(np.float64), np.zeros(x.size // 32))


def bf16(x: np.ndarray) -> Activation:
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    values = (rounded.astype(np.uint32) << 16).view(np.float32)
    raw = aligned_zeros(activation_row_bytes("bf16", x.size), np.uint8)
    stored = rounded if ACT_BYTES == 2 else values
    raw[: stored.nbytes] = stored.view(np.uint8)
    return Activation(raw, values.astype(np.float64), np.zeros(x.size // 32))


NAIVE = {"f32": f32, "bf16": bf16, "a32": a32, "q8k": q8k}


def activation(encoding: str, x: np.ndarray) -> Activation:
    return NAIVE[ENCODINGS[encoding].activation](x)


def weights(encoding: str, n_rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Random rows, [n_rows, row_bytes]."""
    if encoding in FLOATS:
        x = rng.standard_normal((n_rows, k))
        if encoding == "F64":
            return x.view(np.uint8)
        x = x.astype(np.float32)
        narrow = {"F32": x, "F16": x.astype(np.float16), "BF16": (x.view(np.uint32) >> 16).astype(np.uint16)}[encoding]
        return narrow.view(np.uint8).reshape(n_rows, -1)
    return random_blocks(encoding, n_rows * k // ENCODINGS[encoding].block_values, 1.0, rng).reshape(n_rows, -1)


def product(encoding: str, rows: np.ndarray, act: Activation) -> tuple[np.ndarray, np.ndarray]:
    """The naive products of all rows with one activation row, and the sums of absolute products that rounding errors scale with."""
    decoded = np.stack([decode(encoding, row) for row in rows]).astype(np.float64)
    result = decoded @ act.values
    size = np.abs(decoded) @ np.abs(act.values)
    if encoding in ("Q4_1", "Q5_1"):
        # the minimum meets the block's stored sum, which is rounded
        blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, ENCODINGS[encoding].block_bytes)
        minimum = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16)[:, :, 0].astype(np.float64)
        result += minimum @ act.sum_error
        size += 16 * np.abs(minimum) @ np.abs(act.values.reshape(-1, 32)).mean(1)
    return result, size


def run_rows(kernels, w: int, stride: int, n_rows: int, k: int, act: Activation) -> np.ndarray:
    out = aligned_zeros(n_rows + 1, np.float32)
    out[n_rows] = 7
    kernels.rows(w, stride, n_rows, k, act.raw.ctypes.data, out.ctypes.data)
    assert out[n_rows] == 7, "rows() wrote past its last row"
    return out[:n_rows]


def run_tile(kernels, w: int, stride: int, n_rows: int, k: int, acts: list[Activation]) -> np.ndarray:
    out = aligned_zeros((len(acts), n_rows + 1), np.float32)
    out[:, n_rows] = 7
    addresses = np.array([a.raw.ctypes.data for a in acts], np.int64)
    outs = np.array([row.ctypes.data for row in out], np.int64)
    scratch = aligned_zeros(tile_scratch_bytes(k) + 64, np.uint8)
    scratch[-64:] = 7
    kernels.tile(w, stride, n_rows, k, addresses.ctypes.data, len(acts), outs.ctypes.data, scratch.ctypes.data)
    assert (out[:, n_rows] == 7).all(), "tile() wrote past its last row"
    assert (scratch[-64:] == 7).all(), "tile() wrote past its scratch"
    return out[:, :n_rows]


def quantize_record(x: np.ndarray, k: int, out: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """The record of a quantize operation over all rows of x and out, and the count it points to."""
    count = np.array([len(x)], np.int64)
    fields = [count.ctypes.data, x.ctypes.data, x.strides[0], k, out.ctypes.data, out.strides[0], LAYOUTS.index(layout)]
    return np.array(fields, np.int64), count


class LastBytes:
    """Memory whose last byte is the last that may be read: reading one more is a segmentation fault."""

    def __init__(self, content: np.ndarray):
        size = -(-content.size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, size + mmap.PAGESIZE)
        whole = np.frombuffer(self._map, np.uint8)
        whole[size - content.size : size] = content.reshape(-1)
        self.address = whole.ctypes.data + size - content.size
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(whole.ctypes.data + size), ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
