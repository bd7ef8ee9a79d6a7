"""A step's fixed buffers, for tests of the operations that read and write the paged KV cache.

Owns block tables (shuffled, so that neighbouring blocks of a sequence never lie side by side by luck), the KV buffers of one layer, naive
reading and writing of them, and the step record. Must not know the operations.
"""

from __future__ import annotations

import numpy as np

from vllm_cpp.kernels.cpu.kv_cache import KvLayout

MAX_TOKENS = 256


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of float32 as int8 and a float16 scale for each 32: largest magnitude to 127, ties to even, as ggml rounds Q8_0."""
    quants, scales = [], []
    for first in range(0, x.shape[-1], 32):
        part = x[..., first : first + 32]
        largest = np.abs(part).max(-1, keepdims=True)
        factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
        quants.append(np.rint(part * factor).astype(np.int8))
        scales.append((largest / np.float32(127)).astype(np.float16))
    return np.concatenate(quants, -1), np.concatenate(scales, -1)


def run(ops, record: np.ndarray, nth: int = 1) -> None:
    """The operations in order, each for every thread number in turn: what a barrier after each allows."""
    for op in ops:
        for tid in range(nth):
            op(record.ctypes.data, tid, nth)


class Paged:
    def __init__(self, layout: KvLayout, contexts: list[int], rng: np.random.Generator):
        self.layout = layout
        blocks = [-(-n // layout.block_size) for n in contexts]
        order = rng.permutation(sum(blocks) + 3)
        self.block_tables = np.full((len(contexts), max(blocks) + 1), -1, np.int32)
        for seq, n in enumerate(blocks):
            self.block_tables[seq, :n], order = order[:n], order[n:]
        self.k_cache, self.v_cache = layout.allocate(sum(blocks) + 3)
        # what was never written must not matter, not even when it is not a number (as an f16 scale of only ones is not)
        k, v = self._views()
        for part in (k, v[..., : layout.value_length], *self._scales()):
            part[:] = -1 if part.dtype == np.int8 else np.nan
        self.count = np.zeros(1, np.int64)
        self.positions, self.seqs = np.zeros(MAX_TOKENS, np.int32), np.zeros(MAX_TOKENS, np.int32)

    def step(self, tokens: list[tuple[int, int]]) -> None:
        """The tokens of this step as (sequence, position)."""
        self.count[0] = len(tokens)
        self.seqs[: len(tokens)], self.positions[: len(tokens)] = zip(*tokens, strict=True)

    def slot(self, seq: int, position: int) -> tuple[int, int]:
        return int(self.block_tables[seq, position // self.layout.block_size]), position % self.layout.block_size

    def _views(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of K [kv head, block, d, slot] and V [kv head, block, slot, row], without their scales."""
        if self.layout.dtype != "q8_0":
            return self.k_cache, self.v_cache
        d, size, row = self.layout.head_dim, self.layout.block_size, self.layout.value_row
        k, v = self.k_cache[..., : d * size], self.v_cache[..., : row * size]
        return k.view(np.int8).reshape(*k.shape[:2], d, size), v.view(np.int8).reshape(*v.shape[:2], size, row)

    def _scales(self) -> tuple[np.ndarray, ...]:
        """The scales of K [kv head, block, group, slot] and V [kv head, block, slot, group]; nothing where there are none."""
        if self.layout.dtype != "q8_0":
            return ()
        d, size, row = self.layout.head_dim, self.layout.block_size, self.layout.value_row
        k, v = self.k_cache[..., d * size :].view(np.float16), self.v_cache[..., row * size :].view(np.float16)
        return k.reshape(*k.shape[:2], self.layout.key_groups, size), v.reshape(*v.shape[:2], size, self.layout.value_groups)

    def write(self, seq: int, position: int, k: np.ndarray, v: np.ndarray) -> None:
        """k [kv heads, head_dim], v [kv heads, value_length] of one token."""
        block, slot = self.slot(seq, position)
        keys, values = self._views()
        if self.layout.dtype == "q8_0":
            k_scales, v_scales = self._scales()
            k, k_scales[:, block, :, slot] = quantized(np.asarray(k, np.float32))
            v, v_scales[:, block, slot] = quantized(np.asarray(v, np.float32))
        keys[:, block, :, slot] = k
        values[:, block, slot, : self.layout.value_length] = v

    def read(self, seq: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """k [n, kv heads, head_dim], v [n, kv heads, value_length] of a sequence's first n tokens."""
        (keys, values), d, length = self._views(), self.layout.head_dim, self.layout.value_length
        places = [self.slot(seq, position) for position in range(n)]
        k = np.array([keys[:, block, :, slot] for block, slot in places])
        v = np.array([values[:, block, slot, :length] for block, slot in places])
        if self.layout.dtype != "q8_0":
            return k, v
        k_scales, v_scales = self._scales()
        return (
            k * np.repeat(np.array([k_scales[:, block, :, slot] for block, slot in places]).astype(np.float32), 32, -1)[..., :d],
            v * np.repeat(np.array([v_scales[:, block, slot] for block, slot in places]).astype(np.float32), 32, -1)[..., :length],
        )

    def fields(self) -> dict[str, int]:
        """The record fields of every operation on the cache."""
        return {
            "k_cache": address(self.k_cache),
            "v_cache": address(self.v_cache),
            "block_size": self.layout.block_size,
            "num_blocks": self.k_cache.shape[1],
            "block_tables": address(self.block_tables),
            "block_tables_stride": self.block_tables.strides[0],
        }
