"""Expert streaming as an engine meets it: whether its model can be streamed, the one store of the process, and what became of a step's
reads.

Owns the decision which towers are streamed and how they are read, the building of the store and its lanes, every line about streaming but
the statistics, and the error that a failed read becomes. Must not know operations: the builder asks for a layer's record by the names of
its towers.
"""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm_cpp import env, log
from vllm_cpp.config import offload
from vllm_cpp.config.offload import Residency
from vllm_cpp.errors import GenerationError
from vllm_cpp.gguf_file import GGUFModel, TensorInfo
from vllm_cpp.gguf_file.hparams import read_num_layers
from vllm_cpp.kernels.cpu import slots as kernel
from vllm_cpp.residency import disk, inventory
from vllm_cpp.residency.lanes import Lanes
from vllm_cpp.residency.memory import available_bytes
from vllm_cpp.residency.populating import Populating
from vllm_cpp.residency.slots import Layer, SlotStore, StoredModel, TowerSource, cell_bytes
from vllm_cpp.residency.statistics import Report
from vllm_cpp.residency.visits import Asking, Visit

_TOWER: Final = re.compile(r"blk\.(\d+)\.ffn_(gate_up|gate|up|down)_(ch)?exps\.weight")
_ORDER: Final = ("gate", "gate_up", "up", "down")  # of computing
_DEFAULT_POLICY: Final = "next"


@dataclass(slots=True)
class _Process:
    """The store of this process and what serves it."""

    store: SlotStore
    populating: Populating
    lanes: Lanes
    report: Report
    warned: bool = False


_lock = threading.Lock()
_process: _Process | None = None


def expert_layers(model: GGUFModel) -> list[list[TensorInfo]]:
    """The routed layers' towers, each layer's in the order of computing. A layer's chunk experts, which are chosen by themselves, count as
    a layer of their own; layers that only predict further tokens do not run and do not count."""
    num_layers = read_num_layers(model)
    layers: dict[tuple[int, bool], list[tuple[int, TensorInfo]]] = {}
    for info in model.tensors.values():
        match = _TOWER.fullmatch(info.name)
        if match and len(info.shape) == 3 and int(match[1]) < num_layers:
            layers.setdefault((int(match[1]), match[3] is not None), []).append((_ORDER.index(match[2]), info))
    return [[info for _, info in sorted(towers, key=lambda tower: tower[0])] for _, towers in sorted(layers.items())]


def open_stream(model: GGUFModel, residency: Residency, *, streams_experts: bool) -> ExpertStream | None:
    """The model's use of the slot store; None where streaming is off, or where nothing of the model can be streamed, which is said."""
    if not residency.expert_stream:
        return None
    why_not = why_nothing_is_streamed(model, residency, streams_experts=streams_experts)
    if why_not:
        _say(f"[expert-stream] asked for, but nothing of {model.path} is streamed: {why_not}")
        return None
    layers = expert_layers(model)
    slot_bytes = _geometry(residency, layers)[1]
    fitting = _fitting(layers, slot_bytes)
    if len(fitting) < len(layers):
        _say(
            f"[expert-stream] {len(layers) - len(fitting)} of {len(layers)} routed layers are read in place: slices of up to "
            f"{_largest(layers)} bytes do not fit slots of {slot_bytes} bytes (expert_stream.slot_bytes, VT_MOE_EXPERT_STREAM_SLOT_BYTES)"
        )
    return ExpertStream(model, residency, fitting)


def why_nothing_is_streamed(model: GGUFModel, residency: Residency, *, streams_experts: bool) -> str:
    """Why no expert of this model would go through slots, were streaming on; "" where some do."""
    layers = expert_layers(model)
    if not layers:
        return "it has no routed experts"
    if residency.expand:
        return f"{residency.expand} expands its experts to float32"
    if not residency.mmap:
        return "mmap is off, so its experts were copied into memory; turn it on (mmap.enabled, VT_GGUF_MMAP)"
    if not streams_experts:
        return f"the {model.architecture} family does not read its experts through slots"
    slot_bytes = _geometry(residency, layers)[1]
    if not _fitting(layers, slot_bytes):
        return f"no layer's slices fit slots of {slot_bytes} bytes; its largest is {_largest(layers)} bytes"
    return ""


def _fitting(layers: Sequence[Sequence[TensorInfo]], slot_bytes: int) -> list[Sequence[TensorInfo]]:
    return [towers for towers in layers if all(info.slice_bytes <= slot_bytes for info in towers)]


def _largest(layers: Sequence[Sequence[TensorInfo]]) -> int:
    return max(info.slice_bytes for towers in layers for info in towers)


def _geometry(residency: Residency, layers: Sequence[Sequence[TensorInfo]]) -> tuple[int, int]:
    """Slots and bytes of a slot: of the store there is, or of the one there would be."""
    if _process is not None:
        return _process.store.num_slots, _process.store.slot_bytes
    return residency.expert_stream_slots, residency.expert_stream_slot_bytes or _largest(layers)


def _say(text: str) -> None:
    log.once(text, text)


def _process_for(model: GGUFModel, residency: Residency, layers: Sequence[Sequence[TensorInfo]], direct: bool) -> _Process:
    """The process's store, built by the first model that needs it."""
    global _process
    with _lock:
        if _process is None:
            num_slots, slot_bytes = _geometry(residency, layers)
            policy = env.text("VT_MOE_EXPERT_STREAM_POLICY")
            store = SlotStore(num_slots, slot_bytes, policy if policy in kernel.POLICIES else _DEFAULT_POLICY)
            num_lanes = env.number("VT_MOE_EXPERT_STREAM_LANES") or _measured_lanes(model, layers, direct)
            num_slices = sum(info.shape[0] for towers in layers for info in towers)
            populating = Populating(store, num_slices)  # from here on cores and memory are busy
            try:
                lanes = Lanes(store, num_lanes)
            except BaseException:
                populating.close()
                raise
            offload.freeze_geometry(num_slots, slot_bytes)
            log.line(f"[expert-stream] ON slots={num_slots} slot_bytes={slot_bytes} resident={num_slots * slot_bytes / 2**30:.2f} GiB")
            _process = _Process(store, populating, lanes, Report(store.counters))
        return _process


def _measured_lanes(model: GGUFModel, layers: Sequence[Sequence[TensorInfo]], direct: bool) -> int:
    """By reads past the page cache; through it there is nothing to measure, only memory."""
    towers = [info for layer in layers for info in layer if info.shard == layers[0][0].shard]
    if not direct or _largest(layers) < kernel.ALIGNMENT:
        return disk.DEFAULT_LANES
    rng, aligned = random.Random(0), -kernel.ALIGNMENT
    places = [(info.file_offset + rng.randrange(info.shape[0]) * info.slice_bytes) & aligned for info in rng.choices(towers, k=128)]
    try:
        fd = os.open(f"/proc/self/fd/{model.shards[towers[0].shard].fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return disk.DEFAULT_LANES
    try:
        return disk.best_lanes(fd, places, min(info.slice_bytes for info in towers) & aligned or kernel.ALIGNMENT)
    finally:
        os.close(fd)


class ExpertStream:
    """One engine's streamed layers. Everything it gave out is valid until `close`."""

    def __init__(self, model: GGUFModel, residency: Residency, layers: Sequence[Sequence[TensorInfo]]) -> None:
        self._every = residency.expert_stream_stats_every
        self.names = frozenset(info.name for towers in layers for info in towers)
        self.reads_directly = _reads_directly(residency, layers)
        self._process = _process_for(model, residency, layers, self.reads_directly)
        store = self._process.store
        sources = [[_source(model, info) for info in towers] for towers in layers]
        self._model: StoredModel = store.open_model(sources, direct=self.reads_directly)
        self._layers = {frozenset(info.name for info in towers): number for number, towers in enumerate(layers)}
        self._mapped = [[info.address for info in towers] for towers in layers]
        self.visit = Visit(store, max(info.shape[0] for towers in layers for info in towers))
        self._layer_slices = max(len(towers) for towers in layers)
        self._warn_of_memory()
        self._warn_of_few_slots(model, layers)

    def _warn_of_memory(self) -> None:
        store, room = self._process.store, available_bytes()
        missing = store.arena_bytes - self._process.populating.held_bytes
        if room is not None and missing > room:
            _say(
                f"[expert-stream] {store.num_slots} slots take {store.arena_bytes / 2**30:.2f} GiB, and {room / 2**30:.2f} GiB of memory "
                "are available: lower expert_stream.slots (VT_MOE_EXPERT_STREAM_SLOTS) before the system ends this process"
            )

    def _warn_of_few_slots(self, model: GGUFModel, layers: Sequence[Sequence[TensorInfo]]) -> None:
        top_k = inventory.take(model).top_k
        cycle = sum(top_k.get(int(towers[0].name.split(".")[1]), 0) * len(towers) for towers in layers)
        if self._process.store.num_slots < cycle:
            _say(
                f"[expert-stream] slots={self._process.store.num_slots} hold less than one token's working set, {cycle} slices: more slots "
                "would serve far more of them (expert_stream.slots, VT_MOE_EXPERT_STREAM_SLOTS)"
            )

    def asking(self, names: Sequence[str], *, offsets: int, tokens: int, seqs: int) -> tuple[Asking, dict[str, int]] | None:
        """The record of the layer with these towers, and each tower's table of places; None where they are not streamed."""
        number = self._layers.get(frozenset(names))
        if number is None:
            return None
        layer: Layer = self._model.layers[number]
        asking = self.visit.asking(layer, offsets=offsets, tokens=tokens, seqs=seqs, mapped=self._mapped[number])
        return asking, {tower.source.name: int(table.ctypes.data) for tower, table in zip(layer.towers, asking.places, strict=True)}

    def end_step(self) -> None:
        """A model forward is over: count it, and say what could not be read. GenerationError names the file and the slice."""
        self._process.report.end_step(self._every)
        self._process.populating.end_step()
        exhausted = self._process.store.counters.as_dict()["exhausted"]
        if exhausted and not self._process.warned:
            self._process.warned = True
            log.line(
                f"[expert-stream] slices are read in place, without a slot: slots={self._process.store.num_slots} were all in use, and one "
                f"expert takes {self._layer_slices} in each engine (expert_stream.slots, VT_MOE_EXPERT_STREAM_SLOTS)"
            )
        failed = self.visit.take_failure()
        if failed is not None:
            tower = self._model.tower_at(failed.tower)
            assert tower is not None
            raise GenerationError(_failure(tower.source, failed.expert, failed.state, tower.file.size))

    def stats(self) -> dict[str, object]:
        """What this process's store is and has counted."""
        store = self._process.store
        about = {"slots": store.num_slots, "slot_bytes": store.slot_bytes, "policy": store.policy, "lanes": self._process.lanes.count}
        reads = "direct" if any(file.reads_directly for file in self._model.files.values()) else "buffered"
        return {**about, "reads": reads, "occupied": store.occupied, **store.counters.as_dict()}

    def close(self) -> None:
        """Give the slots back. The engine's threads must have stopped. Safe twice."""
        if self._model.layers:
            self.visit.close()
            self._process.store.close_model(self._model)
            self._model = StoredModel(())


def _source(model: GGUFModel, info: TensorInfo) -> TowerSource:
    shard = model.shards[info.shard]
    return TowerSource(info.name, shard.path, shard.fd, shard.identity, info.file_offset, info.slice_bytes, info.shape[0])


def _reads_directly(residency: Residency, layers: Sequence[Sequence[TensorInfo]]) -> bool:
    """Past the page cache when the experts exceed the memory that could cache them beside the arena: copies of what is read once would push
    out the rest."""
    asked = env.switch("VT_MOE_EXPERT_STREAM_DIRECT")
    if asked is not None:
        return asked
    room = available_bytes()
    if room is None:
        return False
    num_slots, slot_bytes = _geometry(residency, layers)
    held = 0 if _process is None else _process.populating.held_bytes
    return sum(info.n_bytes for towers in layers for info in towers) > room - (num_slots * cell_bytes(slot_bytes) - held)


def _failure(source: TowerSource, expert: int, state: int, size: int) -> str:
    offset = source.offset + expert * source.slice_bytes
    what = f"{source.path}: expert {expert} of tensor '{source.name}' ({source.slice_bytes} bytes at byte {offset}) cannot be read"
    if state == kernel.ENDED:
        return f"{what}: the file ends at byte {size}, it has become shorter since it was opened; restore it and load the model again"
    return f"{what}: {os.strerror(-state)}"


def forget_store() -> None:
    """Take the store down. For tests: a process that serves keeps its store."""
    global _process
    with _lock:
        if _process is not None:
            _process.populating.close()
            _process.lanes.close()
            _process.report.end()
            _process = None
