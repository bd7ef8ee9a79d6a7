"""Whether a model's weights fit the device that stages them.

Owns: how many bytes staging takes, the budget, which files the device streaming lane can serve, and the text of the refusal. Pure: it asks
no device and reads no weight. Must not know what else a device's memory holds (KV cache, activations): the bound counts weights only, so a
model just under it may still fail later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from vllm_cpp.quants import ENCODINGS
from vllm_cpp.residency.devices import Device
from vllm_cpp.residency.inventory import Inventory, Weight

_STAGED_VALUE_BYTES: Final = 2  # a device stages floats as 16 bits at most; blocks stay blocks where that is smaller
_GIB: Final = 1 << 30
EAGERLY_RESIDENT: Final = frozenset({"NVFP4"})
"""Encodings that an accelerator takes into an FP4 form of its own while loading, so that nothing in the file's form is left there."""


@dataclass(frozen=True)
class Lane:
    """Whether slices are read from the host's slot store in place instead of being staged; if not, `missing` says why."""

    missing: str = ""

    @property
    def serves(self) -> bool:
        return not self.missing


@dataclass(frozen=True, kw_only=True)
class Need:
    """What staging takes. `streamed_bytes` in `num_streamed` towers are left out of it, and `arena_bytes` are in it instead."""

    total_bytes: int
    num_tensors: int
    largest_bytes: int
    largest_name: str
    num_streamed: int = 0
    streamed_bytes: int = 0
    arena_bytes: int = 0


def staged_bytes(weight: Weight) -> int:
    """Bytes of one weight on the device, at least."""
    return min(weight.n_bytes, _STAGED_VALUE_BYTES * weight.num_values)


def keeps_file_form(encoding: str, keep_quant: bool) -> bool:
    """Whether a device holds a tower of this encoding as the file does: quant blocks, and F16."""
    if encoding in EAGERLY_RESIDENT:
        return False
    return encoding == "F16" or (keep_quant and ENCODINGS[encoding].block_values > 1)


def lane_for(inventory: Inventory, device: Device, *, expert_stream: bool, family_streams: bool, keep_quant: bool = True) -> Lane:
    """The lane for this file on this device. Every condition has to hold; one tower that is not kept keeps the whole bound."""
    towers = [weight for weights in inventory.towers.values() for weight in weights]
    if not towers:
        return Lane("the model has no routed experts")
    if not device.host_addressable:
        return Lane(f"{device.name} cannot read host memory in place")
    if not family_streams:
        return Lane(f'architecture "{inventory.architecture}" does not read its experts through slots')
    for weight in towers:
        if not keeps_file_form(weight.encoding, keep_quant):
            return Lane(f"'{weight.name}' is {weight.encoding}, which is not kept in the file's form")
    return Lane("" if expert_stream else "expert streaming is off")


def need_of(inventory: Inventory, *, lane: Lane, arena_bytes: int = 0, placed: Iterable[int] = ()) -> Need:
    """The need of everything but the towers of layers that are placed on the CPU and, where the lane serves, all other towers."""
    elsewhere = set(placed)
    total = count = largest = streamed = num_streamed = 0
    name = ""
    for weight in inventory.weights:
        if weight.num_experts and weight.layer in elsewhere:
            continue
        size = staged_bytes(weight)
        if weight.num_experts and lane.serves:
            streamed, num_streamed = streamed + size, num_streamed + 1
            continue
        total, count = total + size, count + 1
        if size > largest:
            largest, name = size, weight.name
    arena = arena_bytes if num_streamed else 0
    return Need(
        total_bytes=total + arena,
        num_tensors=count,
        largest_bytes=largest,
        largest_name=name,
        num_streamed=num_streamed,
        streamed_bytes=streamed,
        arena_bytes=arena,
    )


def budget_of(device: Device, stated: int | None) -> int | None:
    """Bytes the device may stage: what was stated, else its memory. None is unknown, and 0 is a budget nobody checks."""
    return device.total_bytes if stated is None else stated


def gib(n_bytes: int) -> str:
    """Bytes as "N.NN GiB", cut and not rounded: a figure must not say that what does not fit fits."""
    hundredths = n_bytes * 100 // _GIB
    return f"{hundredths // 100}.{hundredths % 100:02d} GiB"


def refusal(device: Device, budget: int | None, need: Need, lane: Lane) -> str | None:
    """Why this device cannot serve the file, or None when it can, when it stages nothing, or when no budget says so."""
    if not device.stages_weights or not budget or need.total_bytes <= budget:
        return None
    return (
        f"device '{device.name}' cannot serve this GGUF: staging its weights needs at least {need.total_bytes} bytes "
        f"({gib(need.total_bytes)}) of device memory across {need.num_tensors} tensors, the largest single allocation being "
        f"{need.largest_bytes} bytes ({gib(need.largest_bytes)}, '{need.largest_name}'), and this device's memory pool is {budget} bytes "
        f"({gib(budget)}). THE MISSING PART: {_missing(need, lane)}. Use device=cpu, which serves this checkpoint today, or a checkpoint "
        "that fits the pool. VT_DEVICE_WEIGHT_BUDGET_BYTES, or "
        '"vllm_cpp.device_fit.weight_budget_bytes" in the offload document, moves the budget, and 0 suppresses this refusal: the load then '
        "fails later, it does not fit"
    )


def _missing(need: Need, lane: Lane) -> str:
    if not lane.serves:
        return f"for this load there is no device-side expert slot store and no device streaming lane: {lane.missing}"
    return (
        f"not the device streaming lane, which is on: {need.num_streamed} expert towers ({need.streamed_bytes} bytes, "
        f"{gib(need.streamed_bytes)}) are left out above and the slot arena ({need.arena_bytes} bytes, {gib(need.arena_bytes)}) is counted "
        "instead; fewer slots shrink the arena, and nothing shrinks the rest"
    )
