"""How keys and values lie in the KV blocks of one layer.

Owns the layout. Must not know who owns a block. A layer has two buffers:

    K [num_blocks][n_kv_heads][head_dim][block_size]   transposed, so that a score for each token of a block is one lane of a vector
    V [num_blocks][n_kv_heads][block_size][row]        row = head_dim rounded up to 16; what stands beyond head_dim is never written

of f16 (the default) or f32. `block_size` is a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_cpp.kernels.buffers import aligned_zeros

LANES = 16  # block_size and a value row are whole vectors


@dataclass(frozen=True)
class KvLayout:
    n_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str = "f16"  # "f16" | "f32"

    def __post_init__(self) -> None:
        if self.block_size <= 0 or self.block_size % LANES:
            raise ValueError(f"block_size is {self.block_size}, it must be a positive multiple of {LANES}")
        if self.dtype not in ("f16", "f32"):
            raise ValueError(f"KV dtype is {self.dtype!r}, it must be 'f16' or 'f32'")

    @property
    def value_row(self) -> int:
        return (self.head_dim + LANES - 1) // LANES * LANES

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "f16" else 4

    @property
    def block_bytes(self) -> int:
        """Bytes one KV block takes in one layer, keys and values together."""
        return self.n_kv_heads * self.block_size * (self.head_dim + self.value_row) * self.itemsize

    def allocate(self, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """One layer's K and V buffers (pages are not touched)."""
        kind = np.float16 if self.dtype == "f16" else np.float32
        return (
            aligned_zeros((num_blocks, self.n_kv_heads, self.head_dim, self.block_size), kind),
            aligned_zeros((num_blocks, self.n_kv_heads, self.block_size, self.value_row), kind),
        )
