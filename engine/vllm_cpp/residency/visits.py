"""What one engine holds of the slot store while it computes a step, and the records its operations ask the store with.

Owns those arrays and records. Must not know operations: the builder puts `acquire_slices` and `release_slices` on these records into its
program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu import slots as kernel
from vllm_cpp.kernels.records import pack
from vllm_cpp.residency.slots import Layer, SlotStore


@dataclass(frozen=True, slots=True)
class Asking:
    """One layer's record for `acquire_slices`, and where its answers stand: a tower's i64[num_experts, 2] of slice and state addresses."""

    record: np.ndarray
    places: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class FailedRead:
    """The first slice of a step that could not be read: its tower's record, its expert, and the state of its slot (below 0)."""

    tower: int
    expert: int
    state: int


class Visit:
    """One engine's protection and work list, for any of its layers: they are visited one after the other."""

    def __init__(self, store: SlotStore, num_experts: int) -> None:
        """`num_experts`: the most a layer has."""
        self.store = store
        self.wave = aligned_zeros(num_experts, np.int32)
        self._todo = aligned_zeros(num_experts, np.int32)
        self._pinned = aligned_zeros(kernel.MAX_TOWERS * num_experts, np.int32)
        counts = dict.fromkeys(("again", "n_todo", "n_wave", "n_pinned", "failed", "failed_tower", "failed_expert", "fresh"), 0)
        self.record = pack(
            kernel.VISIT_FIELDS, **counts, todo=self._todo.ctypes.data, wave=self.wave.ctypes.data, pinned=self._pinned.ctypes.data,
        )  # fmt: skip
        self._askings: list[Asking] = []  # their addresses are in programs

    @property
    def address(self) -> int:
        return int(self.record.ctypes.data)

    @property
    def again_at(self) -> int:
        """Address of the int64 that is 1 while another wave of the same layer has to follow."""
        return self.address + 8 * kernel.VISIT_AGAIN

    @property
    def n_wave_at(self) -> int:
        """Address of the int64 number of experts in the wave."""
        return self.address + 8 * kernel.VISIT_N_WAVE

    @property
    def wave_experts(self) -> list[int]:
        """The experts of the present wave."""
        return [int(e) for e in self.wave[: self.record[kernel.VISIT_N_WAVE]]]

    @property
    def again(self) -> bool:
        """Whether another wave of the same layer has to follow."""
        return bool(self.record[kernel.VISIT_AGAIN])

    def asking(self, layer: Layer, *, offsets: int, tokens: int, seqs: int, mapped: Sequence[int]) -> Asking:
        """The record of one layer. Addresses: of the pairs' offsets, of the counts of rows and sequences, of each tower in the caller's
        mapping."""
        num_experts, n = len(layer.heats), len(layer.towers)
        places = [aligned_zeros((num_experts, 2), np.int64) for _ in range(n)]

        def three(name: str, addresses: Sequence[int]) -> dict[str, int]:
            return {f"{name}{i}": addresses[i] if i < n else 0 for i in range(kernel.MAX_TOWERS)}

        record = pack(
            kernel.ACQUIRE_FIELDS, store=self.store.address, visit=self.address, offsets=offsets, n_experts=num_experts, tokens=tokens,
            seqs=seqs, n_towers=n, **three("tower", [tower.address for tower in layer.towers]), **three("mapped", mapped),
            **three("places", [table.ctypes.data for table in places]),
        )  # fmt: skip
        self._askings.append(Asking(record, places))
        return self._askings[-1]

    def take_failure(self) -> FailedRead | None:
        """What went wrong in the step that ended, forgotten with this call."""
        words = self.record
        state = int(words[kernel.VISIT_FAILED])
        if state == 0:
            return None
        words[kernel.VISIT_FAILED] = words[kernel.VISIT_AGAIN] = 0
        return FailedRead(int(words[kernel.VISIT_FAILED_TOWER]), int(words[kernel.VISIT_FAILED_EXPERT]), state)

    def close(self) -> None:
        """Let go of everything, whatever became of the last step. The engine's threads must have stopped."""
        if self._askings:
            kernel.release_slices(self._askings[0].record.ctypes.data, 0, 1)
