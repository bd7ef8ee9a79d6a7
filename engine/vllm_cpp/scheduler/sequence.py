"""One request as the scheduler sees it.

Owns: the token ids, how many of them have keys and values, and in which blocks. Must not know how tokens are chosen or who asked.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class Place(Enum):
    """Which list of the scheduler a sequence is in."""

    NOWHERE = "nowhere"
    WAITING = "waiting"
    RUNNING = "running"


class Sequence:
    """Token ids (the prompt, then what was generated) and the KV blocks that hold the computed ones.

    `owner` is whoever asked; it is carried, never looked at.
    """

    __slots__ = ("block_ids", "block_keys", "num_cached", "num_computed", "num_registered", "owner", "place", "state_id", "tokens")

    def __init__(self, prompt: list[int], owner: Any = None) -> None:
        self.tokens = list(prompt)
        self.owner = owner
        self.place = Place.NOWHERE
        self.num_computed = 0
        self.num_cached: int | None = None  # tokens taken from the prefix cache when it was first admitted; None before that
        self.num_registered = 0  # leading blocks that were offered to the prefix cache
        self.state_id = -1  # while it runs: where recurrent layers keep what they know of it
        self.block_ids: list[int] = []
        self.block_keys: list[bytes] = []  # of the leading full blocks, made on demand; they survive a preemption

    @property
    def num_pending(self) -> int:
        """Tokens that have no keys and values yet."""
        return len(self.tokens) - self.num_computed

    def forget_blocks(self) -> list[int]:
        """Give up every block (the caller returns them to the pool); all tokens are to be computed again."""
        block_ids, self.block_ids = self.block_ids, []
        self.num_computed = self.num_registered = 0
        return block_ids
