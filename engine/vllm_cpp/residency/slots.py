"""The slot store: an arena of slots, what stands in them, and the models whose slices they hold.

Owns the memory that the compiled half (`kernels/cpu/slots.py`) works on, and which towers are known to it. A model is known by the identity
of its files and where its towers lie in them, never by an address: two engines on one file share its slices, and a tower that goes takes
its slices along. Must not know what a slice is for, nor who reads it in (`lanes.py`).
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file.mapped import Identity
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu import slots as kernel
from vllm_cpp.kernels.records import pack
from vllm_cpp.residency.files import OpenFile
from vllm_cpp.residency.memory import take
from vllm_cpp.residency.statistics import Counters

MAX_LAYERS = 4096  # records of routed layers, of all models that are open at one time
_N_LAYERS = kernel.FIELDS + kernel.STORE_FIELDS.index("n_layers")
_LARGE_PAGE = 2 << 20  # of most machines; only how fast an arena fills depends on it
_SPREAD = 32  # large pages: more reads than that are seldom under way
_STRETCH_BYTES = 128 << 20  # of large slots fewer: a stretch is taken as a whole


@dataclass(frozen=True, slots=True)
class TowerSource:
    """A tower, as its file holds it: `num_experts` slices of `slice_bytes`, one behind the other from `offset`."""

    name: str
    path: str
    fd: int
    identity: Identity
    offset: int
    slice_bytes: int
    num_experts: int

    @property
    def key(self) -> tuple[Identity, int, int]:
        return self.identity, self.offset, self.slice_bytes


@dataclass(slots=True)
class Tower:
    """A tower in the store. Its record's address is how compiled code names it."""

    source: TowerSource
    file: OpenFile
    record: np.ndarray
    slot_of: np.ndarray

    @property
    def address(self) -> int:
        return int(self.record.ctypes.data)


@dataclass(slots=True)
class Layer:
    """A routed layer: its towers in the order of computing, and how often each expert was chosen lately."""

    number: int
    towers: list[Tower]
    heats: np.ndarray  # f64[num_experts, HEATS]


@dataclass(slots=True)
class StoredModel:
    """The layers of one model, for as many engines as opened it."""

    key: tuple[tuple[tuple[Identity, int, int], ...], ...]
    layers: list[Layer] = field(default_factory=list)
    files: dict[Identity, OpenFile] = field(default_factory=dict)
    engines: int = 0

    def tower_at(self, address: int) -> Tower | None:
        return next((tower for layer in self.layers for tower in layer.towers if tower.address == address), None)


def cell_bytes(slot_bytes: int) -> int:
    """Bytes of the arena that a slot takes: a slice stands in it at the offset it has in its file page."""
    return -(-(slot_bytes + kernel.ALIGNMENT - 1) // kernel.ALIGNMENT) * kernel.ALIGNMENT


def taking_order(num_slots: int, cell_bytes: int) -> tuple[np.ndarray, int]:
    """The order in which an empty arena's slots are taken, i32[num_slots], and the slots of a stretch.

    Neighbours in it are a large page apart: two reads that meet in a page which is not there yet would both fetch and zero one. It stays
    within a stretch until that is full, so that few pages are taken early.
    """
    stride = -(-_LARGE_PAGE // cell_bytes) + 1
    spread = max(1, min(_SPREAD, _STRETCH_BYTES // (stride * cell_bytes)))
    stretch = stride * spread
    within = np.arange(stretch).reshape(spread, stride).T.ravel()
    slots = (np.arange(-(-num_slots // stretch))[:, None] * stretch + within).ravel()
    return slots[slots < num_slots].astype(np.int32), stretch


class SlotStore:
    """`num_slots` slots, each with room for a slice of `slot_bytes` at any offset within a page."""

    def __init__(self, num_slots: int, slot_bytes: int, policy: str = "next") -> None:
        self.num_slots, self.slot_bytes, self.policy = num_slots, slot_bytes, policy
        self.cell_bytes = cell_bytes(slot_bytes)
        self.arena = _arena(num_slots, self.cell_bytes)
        self.counters = Counters()
        self.records = aligned_zeros((num_slots, kernel.SLOT_WORDS), np.int64)
        self._layers = aligned_zeros((MAX_LAYERS, kernel.LAYER_WORDS), np.int64)
        self._work = [aligned_zeros(num_slots, np.int32), aligned_zeros(num_slots, np.int32), aligned_zeros((num_slots, 2), np.int64)]
        self._heap = [aligned_zeros(num_slots, np.int64) for _ in range(3)]
        order, self._stretch = taking_order(num_slots, self.cell_bytes)
        self._work[0][:] = order[::-1]  # a stack
        free, ring, misses = (array.ctypes.data for array in self._work)
        worst, worst_by, worst_age = (array.ctypes.data for array in self._heap)
        self._record = aligned_zeros(kernel.STORE_WORDS, np.int64)
        self._record[kernel.FIELDS : kernel.FIELDS + len(kernel.STORE_FIELDS)] = pack(
            kernel.STORE_FIELDS, slots=self.records.ctypes.data, n_slots=num_slots, arena=self.arena_address,
            cell_bytes=self.cell_bytes, policy=kernel.POLICIES[policy], layers=self._layers.ctypes.data, n_layers=0, free=free, ring=ring,
            misses=misses, worst=worst, worst_by=worst_by, worst_age=worst_age, counters=self.counters.address,
        )  # fmt: skip
        kernel.open_store(self.address)
        self._models: dict[object, StoredModel] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        return int(self._record.ctypes.data)

    @property
    def ended_at(self) -> int:
        """Address of the int64 number of reads that have ended."""
        return self.address + 8 * kernel.ENDED_READS

    @property
    def arena_bytes(self) -> int:
        return len(self.arena)

    @property
    def arena_address(self) -> int:
        return int(np.frombuffer(self.arena, np.uint8).ctypes.data)

    def taken_bytes(self, num_slots: int) -> int:
        """Where the stretches end that the first `num_slots` slots to be taken come from, in bytes of the arena."""
        return min(-(-num_slots // self._stretch) * self._stretch * self.cell_bytes, self.arena_bytes)

    @property
    def in_use(self) -> int:
        """Slots that are protected now."""
        return self.num_slots - int(self._record[kernel.N_UNPINNED])

    @property
    def occupied(self) -> int:
        """Slots that hold a slice, or are being filled with one."""
        return self.num_slots - int(self._record[kernel.N_FREE])

    def open_model(self, layers: Sequence[Sequence[TowerSource]], *, direct: bool) -> StoredModel:
        """Make a model's towers known, or find them known already. Every call is ended by one `close_model`. `direct`: read past the page
        cache where the file system can."""
        key = tuple(tuple(tower.key for tower in towers) for towers in layers)
        with self._lock:
            model = self._models.get(key)
            if model is None:
                model = StoredModel(key)
                try:
                    self._describe(model, layers, direct)
                except BaseException:
                    self._forget(model)
                    raise
                self._models[key] = model
            model.engines += 1
            return model

    def _describe(self, model: StoredModel, layers: Sequence[Sequence[TowerSource]], direct: bool) -> None:
        number = next(self._numbers)
        for position, towers in enumerate(layers):
            heats = aligned_zeros((towers[0].num_experts, kernel.HEATS), np.float64)
            layer = Layer(self._free_layer(), [], heats)
            model.layers.append(layer)
            for source in towers:
                file = model.files.get(source.identity)
                if file is None:
                    file = model.files[source.identity] = OpenFile(source.path, source.fd, direct=direct)
                slot_of = aligned_zeros(source.num_experts, np.int32)
                slot_of[:] = -1
                record = pack(
                    kernel.TOWER_FIELDS, file=file.address, offset=source.offset, slice_bytes=source.slice_bytes,
                    slot_of=slot_of.ctypes.data, layer=layer.number, heats=heats.ctypes.data,
                )  # fmt: skip
                layer.towers.append(Tower(source, file, record, slot_of))
            row = self._layers[layer.number]
            row[kernel.LAYER_PERIOD], row[kernel.LAYER_POSITION] = len(layers), position
            row[kernel.LAYER_SHARES : kernel.LAYER_SHARES + len(kernel.FIRST_SHARES)] = np.array(kernel.FIRST_SHARES).view(np.int64)
            row[kernel.LAYER_MODEL] = number  # last: from here on the record counts
            self._record[_N_LAYERS] = max(int(self._record[_N_LAYERS]), layer.number + 1)

    def _free_layer(self) -> int:
        free = np.flatnonzero(self._layers[:, kernel.LAYER_MODEL] == 0)
        if len(free) == 0:
            raise ModelLoadError(f"expert streaming: {MAX_LAYERS} routed layers are open in this process already; close a model first")
        self._layers[free[0]] = 0
        self._layers[free[0], kernel.LAYER_MODEL] = -1  # taken, and nobody's neighbour yet
        self._layers[free[0], kernel.LAYER_PERIOD] = 1
        return int(free[0])

    def close_model(self, model: StoredModel) -> None:
        """One engine less uses the model; the last one's going empties its slots. Its visits must be over."""
        with self._lock:
            model.engines -= 1
            if model.engines == 0:
                self._models.pop(model.key, None)
                self._forget(model)

    def _forget(self, model: StoredModel) -> None:
        for layer in model.layers:
            for tower in layer.towers:
                kernel.drop_tower(self.address, tower.address)
            self._layers[layer.number, kernel.LAYER_MODEL] = 0
        for file in model.files.values():
            file.close()
        model.layers.clear()
        model.files.clear()


def _arena(num_slots: int, cell_bytes: int) -> mmap.mmap:
    try:
        return take(num_slots * cell_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise ModelLoadError(
            f"expert streaming: no memory for {num_slots} slots of {cell_bytes} bytes ({num_slots * cell_bytes / 2**30:.2f} GiB): {error}; "
            "lower expert_stream.slots (VT_MOE_EXPERT_STREAM_SLOTS)"
        ) from error
