"""Names for the contents of KV blocks.

Owns: the chain hash over full blocks. Must not know where a block is or who uses it.

The keys and values of a block depend on every token before it, so a block's key hashes its own tokens together with the key of the block
before. The hash is cryptographic: equal keys mean equal prefixes, so no tokens are kept or compared, and no prompt can be made to hit
another's blocks.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from .sequence import Sequence

_ROOT = b""  # stands before the first block; no digest is empty


def block_key(parent: bytes, token_ids: list[int]) -> bytes:
    """The key of a full block of `token_ids` that follows the block named `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


def keys_of(sequence: Sequence, num_blocks: int, block_size: int) -> list[bytes]:
    """The keys of the first `num_blocks` blocks of a sequence, all of them full; remembered in the sequence."""
    keys = sequence.block_keys
    while len(keys) < num_blocks:
        begin = len(keys) * block_size
        keys.append(block_key(keys[-1] if keys else _ROOT, sequence.tokens[begin : begin + block_size]))
    return keys[:num_blocks]
