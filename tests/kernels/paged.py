"""A step's fixed buffers, for tests of the operations that read and write the paged KV cache.

Owns block tables (shuffled, so that neighbouring blocks of a sequence never lie side by side by luck), the KV buffers of one layer and
the step record. Must not know the operations.
"""

from __future__ import annotations

import numpy as np

from vllm_cpp.kernels.cpu.kv_cache import KvLayout

MAX_TOKENS = 256


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


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
        # what was never written must not matter, not even when it is not a number
        self.k_cache[:] = np.nan
        self.v_cache[..., : layout.head_dim] = np.nan
        self.count = np.zeros(1, np.int64)
        self.positions, self.seqs = np.zeros(MAX_TOKENS, np.int32), np.zeros(MAX_TOKENS, np.int32)

    def step(self, tokens: list[tuple[int, int]]) -> None:
        """The tokens of this step as (sequence, position)."""
        self.count[0] = len(tokens)
        self.seqs[: len(tokens)], self.positions[: len(tokens)] = zip(*tokens, strict=True)

    def slot(self, seq: int, position: int) -> tuple[int, int]:
        return int(self.block_tables[seq, position // self.layout.block_size]), position % self.layout.block_size

    def write(self, seq: int, position: int, k: np.ndarray, v: np.ndarray) -> None:
        """k, v [kv heads, d] of one token."""
        block, slot = self.slot(seq, position)
        self.k_cache[block, :, :, slot] = k
        self.v_cache[block, :, slot, : self.layout.head_dim] = v

    def read(self, seq: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """k, v [n, kv heads, d] of a sequence's first n tokens."""
        places = [self.slot(seq, position) for position in range(n)]
        return (
            np.array([self.k_cache[block, :, :, slot] for block, slot in places]),
            np.array([self.v_cache[block, :, slot, : self.layout.head_dim] for block, slot in places]),
        )

    def fields(self) -> dict[str, int]:
        """The record fields of every operation on the cache."""
        return {
            "k_cache": address(self.k_cache),
            "v_cache": address(self.v_cache),
            "block_size": self.layout.block_size,
            "block_tables": address(self.block_tables),
            "block_tables_stride": self.block_tables.strides[0],
        }
