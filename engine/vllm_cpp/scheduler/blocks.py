"""The pool of KV blocks.

Owns: which blocks are in use and by how many sequences, which hold a prefix worth keeping, and the order in which those are given up.
Must not know tokens or sequences.

A block is in one of three places: in use (its count is above zero), cached (unused, but its contents have a key and may be found again), or
blank. A new block is taken from the blank ones first, then from the cached one that has been unused for longest. Nothing is kept of a block
that was never taken: their number may come from a file, and be larger than memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._uses: list[int] = []  # of every block that was ever taken; the others follow, lowest id first
        self._keys: list[bytes | None] = []  # of the same
        self._by_key: dict[bytes, int] = {}
        self._blank: list[int] = []  # those of them that are blank again, a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused for longest first

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out, cached ones included."""
        return self.num_blocks - len(self._uses) + len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def is_unused(self, block_id: int) -> bool:
        return block_id >= len(self._uses) or self._uses[block_id] == 0

    def take(self, count: int) -> list[int]:
        """`count` blocks with a use of one each; their contents are garbage. The caller has asked `num_free` first."""
        taken = [self._next() for _ in range(count)]
        for block_id in taken:
            self._uses[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """One more use of blocks that were found by key."""
        for block_id in block_ids:
            if self._uses[block_id] == 0:
                del self._cached[block_id]
            self._uses[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        """One use less of each, the tail first, so that it is evicted first: a block is of no use without those before it."""
        for block_id in reversed(block_ids):
            self._uses[block_id] -= 1
            if self._uses[block_id] == 0:
                if self._keys[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def register(self, block_id: int, key: bytes) -> None:
        """Make the contents of a block findable. A key that another block has already keeps that block: one copy is enough."""
        if self._keys[block_id] is None and self._by_key.setdefault(key, block_id) == block_id:
            self._keys[block_id] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of keys, from the first, that is held."""
        found: list[int] = []
        for key in keys:
            block_id = self._by_key.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _next(self) -> int:
        if self._blank:
            return self._blank.pop()
        if len(self._uses) == self.num_blocks:
            return self._evict()
        self._uses.append(0)
        self._keys.append(None)
        return len(self._uses) - 1

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        key = self._keys[block_id]
        assert key is not None
        del self._by_key[key]
        self._keys[block_id] = None
        return block_id
