"""How keys and values lie in the KV blocks of one layer.

Owns the layout. Must not know who owns a block. A layer has two buffers, a panel for each block of each KV head:

    K [num_kv_heads][num_blocks][head_dim][block_size]   transposed, so that a score for each token of a block is one lane of a vector
    V [num_kv_heads][num_blocks][block_size][row]        row = value_length rounded up to 16; what stands beyond is never written

of f16 (the default), f32, or q8_0: int8, each 32 dimensions of a token times one f16 scale, as the weight encoding of that name has it. A
panel's scales stand behind its numbers: K's as f16[groups][block_size], V's as f16[block_size][groups]. `block_size` is a multiple of 16.
Keys have `head_dim` values, values as many unless `value_length` says otherwise.
Heads come first because attention goes through one head after the other, and a sequence's blocks mostly follow each other: it then reads
memory straight on, a tenth faster than in panels far apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_cpp.kernels.buffers import aligned_zeros

LANES = 16  # block_size and a value row are whole vectors
GROUP = 32  # dimensions that share a scale
FORMATS = ("f16", "f32", "q8_0")  # a record's `kv_format` is a place in this list
F16, F32, Q8_0 = range(len(FORMATS))
_ITEM_BYTES = {"f16": 2, "f32": 4, "q8_0": 1}
_DTYPES = {"f16": np.float16, "f32": np.float32}


@dataclass(frozen=True)
class KvLayout:
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str = "f16"
    value_length: int = 0  # 0: as long as a key, and is then set to that

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_length", self.value_length or self.head_dim)
        if self.block_size <= 0 or self.block_size % LANES:
            raise ValueError(f"block_size is {self.block_size}, it must be a positive multiple of {LANES}")
        if self.dtype not in FORMATS:
            raise ValueError(f"KV dtype is {self.dtype!r}, it must be one of: {' '.join(FORMATS)}")

    @property
    def kv_format(self) -> int:
        return FORMATS.index(self.dtype)

    @property
    def value_row(self) -> int:
        """Numbers in a row of V."""
        return (self.value_length + LANES - 1) // LANES * LANES

    @property
    def key_groups(self) -> int:
        """Scales of a token's keys."""
        return -(-self.head_dim // GROUP) if self.dtype == "q8_0" else 0

    @property
    def value_groups(self) -> int:
        """Scales of a token's values."""
        return -(-self.value_length // GROUP) if self.dtype == "q8_0" else 0

    @property
    def k_stride(self) -> int:
        """Bytes from one dimension of the keys to the next."""
        return _ITEM_BYTES[self.dtype] * self.block_size

    @property
    def v_stride(self) -> int:
        """Bytes from one token's values to the next one's."""
        return _ITEM_BYTES[self.dtype] * self.value_row

    @property
    def k_bytes(self) -> int:
        """Bytes of one panel of keys."""
        return self.k_stride * self.head_dim + 2 * self.key_groups * self.block_size

    @property
    def v_bytes(self) -> int:
        """Bytes of one panel of values."""
        return self.v_stride * self.block_size + 2 * self.value_groups * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes one KV block takes in one layer, keys and values together."""
        return self.num_kv_heads * (self.k_bytes + self.v_bytes)

    def allocate(self, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """One layer's K and V buffers (pages are not touched); of bytes, a panel each, where numbers and scales share a panel."""
        if self.dtype == "q8_0":
            k_shape, v_shape = (self.k_bytes,), (self.v_bytes,)
        else:
            k_shape, v_shape = (self.head_dim, self.block_size), (self.block_size, self.value_row)
        kind = _DTYPES.get(self.dtype, np.uint8)
        return (
            aligned_zeros((self.num_kv_heads, num_blocks, *k_shape), kind),
            aligned_zeros((self.num_kv_heads, num_blocks, *v_shape), kind),
        )
