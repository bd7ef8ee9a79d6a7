"""Drives the compiled store without a model: experts are named by a test, and reads end when the test says so."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from vllm_cpp.gguf_file.mapped import Identity
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu import slots as kernel
from vllm_cpp.residency.slots import SlotStore, TowerSource
from vllm_cpp.residency.visits import Visit

SLICE_BYTES = 96


def sources(
    path: str, layers: int, towers: int, experts: int, *, slice_bytes: int = SLICE_BYTES, first: int = 0
) -> list[list[TowerSource]]:
    """Towers that lie in the file one behind the other. The descriptor is the caller's to close."""
    fd = os.open(path, os.O_RDONLY)
    status = os.fstat(fd)
    identity = Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return [
        [
            TowerSource(f"blk.{il}.tower{t}", path, fd, identity, first + (il * towers + t) * experts * slice_bytes, slice_bytes, experts)
            for t in range(towers)
        ]
        for il in range(layers)
    ]


class Engine:
    """One engine's way through the layers of its model."""

    def __init__(self, store: SlotStore, layers: list[list[TowerSource]], mapped: int = 0, *, direct: bool = False) -> None:
        self.store = store
        self.model = store.open_model(layers, direct=direct)
        num_experts = layers[0][0].num_experts
        self.visit = Visit(store, num_experts)
        self._offsets = aligned_zeros(num_experts + 1, np.int32)
        self._counts = aligned_zeros(2, np.int64)
        base = layers[0][0].offset
        self.askings = [
            self.visit.asking(
                layer,
                offsets=self._offsets.ctypes.data,
                tokens=self._counts.ctypes.data,
                seqs=self._counts.ctypes.data + 8,
                mapped=[mapped + tower.source.offset - base for tower in layer.towers],
            )
            for layer in self.model.layers
        ]

    def ask(self, layer: int, chosen: dict[int, int] | Iterable[int], tokens: int = 1, seqs: int = 1) -> None:
        """Visit a layer whose experts were chosen so often, and begin with its first wave."""
        counts = chosen if isinstance(chosen, dict) else dict.fromkeys(chosen, 1)
        self._offsets[0] = 0
        np.cumsum([counts.get(e, 0) for e in range(len(self._offsets) - 1)], out=self._offsets[1:])
        self._counts[:] = tokens, seqs
        kernel.acquire_slices(self.askings[layer].record.ctypes.data, 0, 1)
        self.next_wave(layer)  # a layer's loop begins here, and finds the first wave

    def next_wave(self, layer: int) -> None:
        kernel.acquire_more(self.askings[layer].record.ctypes.data, 0, 1)

    def place(self, layer: int, tower: int, expert: int) -> tuple[int, int]:
        """Where a slice is, and the state of its slot."""
        address, state_at = (int(x) for x in self.askings[layer].places[tower][expert])
        words = self.store.records.ctypes.data
        if words <= state_at < words + self.store.records.nbytes:
            return address, int(self.store.records.ravel()[(state_at - words) // 8])
        return address, kernel.READY  # in the mapping

    def slot_of(self, layer: int, tower: int, expert: int) -> int:
        return int(self.model.layers[layer].towers[tower].slot_of[expert])

    def end_step(self) -> None:
        kernel.release_slices(self.askings[0].record.ctypes.data, 0, 1)


def finish_reads(store: SlotStore) -> int:
    """Pretend that every posted read ended well; how many there were."""
    filling = store.records[:, kernel.SLOT_STATE] == kernel.FILLING
    store.records[filling, kernel.SLOT_STATE] = kernel.READY
    return int(filling.sum())


def held(store: SlotStore, engines: dict[str, Engine]) -> set[tuple[str, int, int, int]]:
    """Every slice in a slot, by model, layer, tower and expert, as the towers' tables have it; checked against the slots' own records."""
    found = {
        (name, il, t, int(e))
        for name, engine in engines.items()
        for il, layer in enumerate(engine.model.layers)
        for t, tower in enumerate(layer.towers)
        for e in np.flatnonzero(tower.slot_of >= 0)
    }
    for name, il, t, e in found:
        record = store.records[engines[name].slot_of(il, t, e)]
        assert record[kernel.SLOT_TOWER] == engines[name].model.layers[il].towers[t].address
        assert record[kernel.SLOT_EXPERT] == e
    assert store.occupied == len(found)
    return found
