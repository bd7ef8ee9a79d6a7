"""Penalties for tokens that were used before, as vLLM defines them.

Owns: the counts of used tokens and the edits of a row of logits. Must not know when or for whom.

Repetition looks at the prompt and the output, and divides a positive logit, multiplies a negative one. Frequency (times the count) and
presence (once) are subtracted and look at the output only. Counts are kept sparse: a penalty touches the tokens that occurred, not the
vocabulary.
"""

from __future__ import annotations

import numpy as np


class TokenCounts:
    """Distinct token ids and how often each occurred, in two arrays that grow."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.empty(64, np.float32)

    def add(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is not None:
            self._counts[slot] += 1
            return
        slot = self._slots[token_id] = len(self._slots)
        if slot == self._ids.size:
            self._ids = np.concatenate((self._ids, self._ids))
            self._counts = np.concatenate((self._counts, self._counts))
        self._ids[slot] = token_id
        self._counts[slot] = 1

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._slots)]


def repeat(logits: np.ndarray, ids: np.ndarray, penalty: float) -> None:
    """The repetition penalty on distinct `ids`, in place."""
    values = logits[ids]
    logits[ids] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))


def subtract(logits: np.ndarray, ids: np.ndarray, counts: np.ndarray, frequency: float, presence: float) -> None:
    """The frequency and presence penalties on distinct `ids`, in place."""
    logits[ids] -= np.float32(frequency) * counts + np.float32(presence)
