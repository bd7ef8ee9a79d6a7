"""The whole answer for one file on one device: what lives where, in bytes, and whether it can be served.

Owns: putting the single decisions (lane, need, placement, fit) together in their order, and the sums a person asks for. Pure but for one
look at the memory that is free. A load acts on it, and `vllm-cli --plan` prints it; neither decides anything by itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_cpp.config.offload import Residency
from vllm_cpp.gguf_file import GGUFModel
from vllm_cpp.residency import device_fit, inventory, placement
from vllm_cpp.residency.device_fit import Lane, Need
from vllm_cpp.residency.devices import Device
from vllm_cpp.residency.inventory import Inventory, Weight
from vllm_cpp.residency.memory import available_bytes, group_limit_bytes, machine_headroom
from vllm_cpp.residency.placement import Placement
from vllm_cpp.residency.streaming import why_nothing_is_streamed

if TYPE_CHECKING:
    from vllm_cpp.residency.forecast import Forecast


@dataclass(frozen=True, kw_only=True)
class Place:
    """The weights of one layer (None: outside the layers) of one sort that live in one way."""

    layer: int | None
    what: str  # "dense" or "experts"
    n_bytes: int
    lives: str
    computed_on: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a load of this file would do. `refusal` is why it would be refused, or None."""

    path: str
    num_shards: int
    file_bytes: int
    inventory: Inventory
    residency: Residency
    device: Device
    budget: int | None
    lane: Lane
    need: Need
    placement: Placement
    refusal: str | None
    streamed: frozenset[int]  # layers whose experts go through slots
    available_bytes: int | None
    limit_bytes: int | None  # of this process's control group
    machine_bytes: int | None  # available, whatever the group leaves of it
    unstreamed: str = ""  # why nothing is streamed though it was asked for
    forecast: Forecast | None = None  # of streaming, where it was measured

    @cached_property
    def towers(self) -> list[Weight]:
        return [tower for towers in self.inventory.towers.values() for tower in towers]

    @property
    def tower_bytes(self) -> int:
        return sum(tower.n_bytes for tower in self.towers)

    @property
    def dense_bytes(self) -> int:
        """Everything that every token reads."""
        return sum(weight.n_bytes for weight in self.inventory.weights) - self.tower_bytes

    @property
    def slices(self) -> dict[int, int]:
        """How many slices there are of each size, the largest first."""
        sizes: Counter[int] = Counter()
        for tower in self.towers:
            sizes[tower.slice_bytes] += tower.num_experts
        return dict(sorted(sizes.items(), reverse=True))

    @property
    def largest_slice(self) -> int:
        """Bytes; 0 without routed experts."""
        return max(self.slices, default=0)

    @property
    def working_set(self) -> tuple[int, int]:
        """(slices, bytes) of towers that one token reads."""
        used = [(self.inventory.top_k.get(int(tower.layer or 0), 0), tower.slice_bytes) for tower in self.towers]
        return sum(count for count, _ in used), sum(count * size for count, size in used)

    @property
    def places(self) -> list[Place]:
        """Every weight once: what stands outside the layers first, then layer by layer."""
        sums: dict[tuple[int, bool], int] = {}
        for weight in self.inventory.weights:
            key = (-1 if weight.layer is None else weight.layer, weight.num_experts > 0)
            sums[key] = sums.get(key, 0) + weight.n_bytes
        return [self._place(None if layer < 0 else layer, expert, n_bytes) for (layer, expert), n_bytes in sorted(sums.items())]

    def _place(self, layer: int | None, expert: bool, n_bytes: int) -> Place:
        on_cpu = not self.device.stages_weights or (expert and layer in self.placement.on_cpu)
        if expert and layer in self.streamed and (on_cpu or self.lane.serves):
            lives = "slots"
        elif on_cpu:
            # Beside streamed experts everything but towers is copied (see borrow.py).
            mapped = self.residency.mmap and not self.residency.expand and (expert or not self.streamed)
            lives = "mapping" if mapped else "memory"
        else:
            lives = f"{self.device.name} memory"
        placed = expert and layer in self.placement.on_cpu
        return Place(
            layer=layer,
            what="experts" if expert else "dense",
            n_bytes=n_bytes,
            lives=lives,
            computed_on=placement.TARGET if placed else self.device.name,
        )


def make(model: GGUFModel, residency: Residency, device: Device, *, streams_experts: bool, places_experts: bool) -> Plan:
    """The plan for an opened file. `streams_experts`, `places_experts`: its family reads them through slots, honours a placement.

    ModelLoadError where the placement cannot be honoured; weights that do not fit are the plan's `refusal`.
    """
    items = inventory.take(model)
    conditions = {"expert_stream": residency.expert_stream, "family_streams": streams_experts, "keep_quant": not residency.expand}
    lane = device_fit.lane_for(items, device, **conditions)
    largest = max((tower.slice_bytes for towers in items.towers.values() for tower in towers), default=0)
    arena_bytes = residency.expert_stream_slots * (residency.expert_stream_slot_bytes or largest)
    budget = device_fit.budget_of(device, residency.device_weight_budget_bytes)
    placed = placement.place(
        items,
        device,
        overrides=residency.placement,
        fit=residency.placement_fit,
        wired=places_experts,
        need=device_fit.need_of(items, lane=lane, arena_bytes=arena_bytes),
        budget=budget,
    )
    need = device_fit.need_of(items, lane=lane, arena_bytes=arena_bytes, placed=placed.on_cpu)
    return Plan(
        path=model.path,
        num_shards=len(model.shards),
        file_bytes=sum(shard.size for shard in model.shards),
        inventory=items,
        residency=residency,
        device=device,
        budget=budget,
        lane=lane,
        need=need,
        placement=placed,
        refusal=device_fit.refusal(device, budget, need, lane),
        streamed=_streamed(items, residency) if streams_experts else frozenset(),
        available_bytes=available_bytes(),
        limit_bytes=group_limit_bytes(),
        machine_bytes=machine_headroom(),
        unstreamed=why_nothing_is_streamed(model, residency, streams_experts=streams_experts) if residency.expert_stream else "",
    )


def _streamed(items: Inventory, residency: Residency) -> frozenset[int]:
    """The layers all of whose slices fit a slot. Copied and expanded weights are in memory already, so nothing of them is streamed."""
    if not (residency.expert_stream and residency.mmap) or residency.expand:
        return frozenset()
    fits = residency.expert_stream_slot_bytes
    towers = items.towers.items()
    return frozenset(layer for layer, weights in towers if fits is None or all(tower.slice_bytes <= fits for tower in weights))
