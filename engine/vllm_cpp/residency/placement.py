"""Which device computes the routed experts of each layer.

Owns: the decision, as pure functions over tensor names, what was asked for and the engine's device; its refusals; and the lines that say
what became of it. Must not know how a layer is computed anywhere, nor keep anything: the caller says the lines and keeps the answer.

A layer's towers are computed together, so a layer is placed whole. The CPU is the only place to go: what is not placed stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from vllm_cpp.config.offload import Override
from vllm_cpp.config.offload.pattern import Allowance, OutOfSteps, Pattern
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.residency.device_fit import EAGERLY_RESIDENT, Need, staged_bytes
from vllm_cpp.residency.devices import Device
from vllm_cpp.residency.inventory import Inventory, Weight

TARGET: Final = "cpu"
_SAYS: Final = "engine: device placement"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`on_cpu` are the layers whose routed experts are computed there though the engine's device is another; `origin` is "stated" or "fit"
    where there are any. `lines` are to be said, once each."""

    device: str
    num_layers: int
    on_cpu: tuple[int, ...] = ()
    origin: str = ""
    lines: tuple[str, ...] = ()


def place(
    inventory: Inventory, device: Device, *, overrides: Sequence[Override], fit: bool, wired: bool, need: Need, budget: int | None
) -> Placement:
    """What was asked for, resolved for one model on one device; ModelLoadError where it cannot be honoured.

    `wired`: the family computes its experts through the placement seam. `need` is what staging takes without a placement, `budget` what
    the device may stage; None or 0 is no limit. At most one of `overrides` and `fit` is given.
    """
    if device.name == TARGET:
        return _inert(inventory, device, overrides, fit)
    towers = inventory.towers
    if not (overrides or fit):
        return Placement(device=device.name, num_layers=inventory.num_layers)
    if not towers:
        return _nothing(inventory, device, "this model has no routed experts, so nothing is placed")
    if not wired:
        raise ModelLoadError(
            f'a placement is configured but architecture "{inventory.architecture}" does not honour it: its experts are not computed '
            'through the placement seam, so nothing would move. Remove "vllm_cpp.placement" and its variables, or wire this family'
        )
    if fit:
        return _fitted(inventory, device, need, budget)
    devices, idle = stated(towers, overrides, device.name)
    on_cpu = tuple(layer for layer, where in devices.items() if where == TARGET)
    refuse_eagerly_resident(towers, on_cpu, device.name)
    lines = [f'{_SAYS}: "{one.path}" ({one.pattern}) decides no routed-expert tower of this model, so it places nothing' for one in idle]
    if not on_cpu:
        return _nothing(inventory, device, "no routed-expert tower of this model matches, so nothing is placed", *lines)
    return _installed(inventory, device, on_cpu, "stated", *lines)


def _inert(inventory: Inventory, device: Device, overrides: Sequence[Override], fit: bool) -> Placement:
    lines = []
    if overrides:
        lines.append(f"{len(overrides)} override(s) resolve(s) to the engine's own device ({device.name}), so nothing is placed")
    if fit:
        lines.append(f"fit has nothing to place, the engine's own device is {device.name}")
    return _nothing(inventory, device, *lines)


def _nothing(inventory: Inventory, device: Device, *lines: str) -> Placement:
    said = tuple(line if line.startswith(_SAYS) else f"{_SAYS}: {line}" for line in lines)
    return Placement(device=device.name, num_layers=inventory.num_layers, lines=said)


def _installed(inventory: Inventory, device: Device, on_cpu: tuple[int, ...], origin: str, *lines: str) -> Placement:
    line = (
        f"{_SAYS} INSTALLED: {len(on_cpu)} layers run their routed experts on {TARGET}, the rest on {device.name} "
        f"(resolved against {inventory.num_layers} layers, origin {origin})"
    )
    return Placement(device=device.name, num_layers=inventory.num_layers, on_cpu=on_cpu, origin=origin, lines=(line, *lines))


def stated(
    towers: Mapping[int, Sequence[Weight]], overrides: Sequence[Override], engine_device: str
) -> tuple[dict[int, str], list[Override]]:
    """The device of each layer's towers, by the first override that matches each, and the spelled-out overrides that decided nothing.

    Refuses a target that is no CPU, a layer whose towers would be split, and patterns that cannot be looked for in bounded time.
    """
    for override in overrides:
        _refuse_target(override, engine_device)
    compiled = cache(Pattern)  # when first asked for: most layers' own abbreviations never are
    allowance = Allowance()
    devices: dict[int, str] = {}
    idle = dict.fromkeys(override for override in overrides if override.layer is None)
    for layer, weights in towers.items():
        asked = [override for override in overrides if override.layer in (None, layer)]
        found = {weight.name: _first(weight.name, asked, compiled, allowance) for weight in weights}
        for override in found.values():
            idle.pop(override, None)  # type: ignore[call-overload]
        targets = {name: engine_device if override is None else override.device for name, override in found.items()}
        _refuse_split(layer, targets)
        devices[layer] = next(iter(targets.values()))
    return devices, list(idle)


def _first(name: str, overrides: Iterable[Override], compiled: Callable[[str], Pattern], allowance: Allowance) -> Override | None:
    for override in overrides:
        try:
            if compiled(override.pattern).search(name, allowance):
                return override
        except OutOfSteps:
            raise ModelLoadError(
                f'"{override.path}.pattern" ({override.pattern}) takes too long to look for in the names of this model\'s tensors: use '
                "fewer or simpler patterns"
            ) from None
    return None


def _refuse_target(override: Override, engine_device: str) -> None:
    if override.device == TARGET:
        return
    what = "the engine's own device" if override.device == engine_device else f"a second device beside the engine's {engine_device}"
    raise ModelLoadError(f'"{override.path}.device" is "{override.device}", {what}, and a placement target must be {TARGET}')


def _refuse_split(layer: int, targets: Mapping[str, str]) -> None:
    first, device = next(iter(targets.items()))
    for name, other in targets.items():
        if other != device:
            raise ModelLoadError(
                f"the placement splits the routed experts of layer {layer}: '{first}' on {device} and '{name}' on {other}; a layer's "
                "towers are computed together, so widen the pattern to all of them"
            )


def refuse_eagerly_resident(towers: Mapping[int, Sequence[Weight]], layers: Iterable[int], engine_device: str) -> None:
    """Refuse to place a layer that has a tower in an encoding of which the device keeps no copy in the file's form."""
    for layer in layers:
        for weight in towers[layer]:
            if weight.encoding in EAGERLY_RESIDENT:
                raise ModelLoadError(
                    f"the routed experts of layer {layer} cannot be placed on {TARGET}: '{weight.name}' is {weight.encoding}, which "
                    f"{engine_device} makes resident in a form of its own while loading; leave this layer out of the placement"
                )


def fitting(tower_bytes: Mapping[int, int], need_bytes: int, budget: int) -> tuple[int, ...]:
    """The layers whose towers have to leave the device so that the rest fits, the last layers first; all of them if none is enough."""
    placed = []
    for layer in sorted(tower_bytes, reverse=True):
        if need_bytes <= budget:
            break
        placed.append(layer)
        need_bytes -= tower_bytes[layer]
    return tuple(sorted(placed))


def _fitted(inventory: Inventory, device: Device, need: Need, budget: int | None) -> Placement:
    if not budget:
        return _nothing(inventory, device, f"fit places nothing: no memory size of {device.name} is known and no budget is set")
    towers = inventory.towers
    sizes = {layer: sum(map(staged_bytes, weights)) for layer, weights in towers.items()}
    if need.num_streamed:
        return _nothing(inventory, device, "fit places nothing: the routed experts are streamed, and none is staged")
    on_cpu = fitting(sizes, need.total_bytes, budget)
    if not on_cpu:
        return _nothing(inventory, device, f"fit places nothing: {need.total_bytes} bytes are within the budget of {budget} bytes")
    refuse_eagerly_resident(towers, on_cpu, device.name)
    return _installed(inventory, device, on_cpu, "fit")
