"""From a document's text to what it says, and the order in which its mistakes are named.

Owns: the refusals that belong to one key. Must not know what is installed or in the environment:
`parse` of equal documents gives equal results, always, and touches no file.

Order: malformed text, unknown top-level keys, unknown keys of `uva`, of `prefetch`, then all of `vllm_cpp`, then the values of vLLM's half.
"""

from __future__ import annotations

from typing import Any, Final

from vllm_cpp import env
from vllm_cpp.errors import InvalidArgumentError

from .document import OffloadDocument, Override, ResidencyRequest
from .keys import children
from .pattern import Pattern, PatternError
from .reader import Reader, join, load, printable, refusal
from .weight_offload import BACKENDS, WeightOffload

DEVICES: Final = ("cpu", "cuda")
MAX_OVERRIDES: Final = 256
"""More than anyone writes by hand, and few enough that looking for each of them in every tensor's name takes no time."""

FIT_AND_MANUAL: Final = '"vllm_cpp.placement.fit" cannot be combined with a manual placement ("overrides", "cpu_moe" or "n_cpu_moe")'


def parse(document: str | bytes | dict[str, Any] | None) -> OffloadDocument:
    """Read a document given as JSON text or as a dict. None and blank text are the inert document."""
    top = Reader(load(document), "", children(""))
    uva = top.child("uva", children("uva"))
    prefetch = top.child("prefetch", children("prefetch"))
    residency = _residency(top.child("vllm_cpp", children("vllm_cpp")))
    return OffloadDocument(residency=residency, weight_offload=_weight_offload(top, uva, prefetch))


def _weight_offload(top: Reader, uva: Reader, prefetch: Reader) -> WeightOffload:
    def integer(key: str, default: int) -> int:
        value = prefetch.integer(key, named=key)
        return default if value is None else value

    return WeightOffload(
        backend=_backend(top.get("offload_backend")),
        cpu_offload_gb=uva.number("cpu_offload_gb") or 0.0,
        cpu_offload_params=uva.strings("cpu_offload_params"),
        group_size=integer("offload_group_size", 0),
        num_in_group=integer("offload_num_in_group", 1),
        prefetch_step=integer("offload_prefetch_step", 1),
        prefetch_params=prefetch.strings("offload_params"),
    )


def _backend(value: object) -> str:
    if value is None:
        return "auto"
    if not isinstance(value, str):
        raise refusal('"offload_backend" must be a string')
    if value not in BACKENDS:
        raise refusal(f'unknown offload_backend "{printable(value)}" (expected auto, uva or prefetch)')
    return value


def _residency(top: Reader) -> ResidencyRequest:
    mmap = _below(top, "mmap")
    said: dict[str, Any] = {"mmap": mmap.boolean("enabled"), "prefault": mmap.boolean("prefault")}
    stream = _below(top, "expert_stream")
    said["expert_stream"] = stream.boolean("enabled")
    said["expert_stream_slots"] = stream.positive("slots")
    said["expert_stream_slot_bytes"] = stream.positive("slot_bytes")
    fit = _below(top, "device_fit")
    said["device_weight_budget_bytes"] = fit.not_negative("weight_budget_bytes", '; 0 means "suppress the device-fit refusal"')
    placement = _below(top, "placement")
    said["placement_overrides"] = _overrides(placement)
    said["cpu_moe"] = placement.boolean("cpu_moe")
    said["n_cpu_moe"] = _cpu_layers(placement)
    said["placement_fit"] = placement.boolean("fit")
    request = ResidencyRequest(**said)
    if request.placement_fit and request.places_by_hand:
        raise refusal(FIT_AND_MANUAL)
    return request


def _below(parent: Reader, key: str) -> Reader:
    return parent.child(key, children(f"{parent.path}.{key}"))


def _cpu_layers(placement: Reader) -> int | None:
    layers = placement.not_negative("n_cpu_moe")
    if layers is not None and layers > env.MAX_CPU_LAYERS:
        raise refusal(f'"{join(placement.path, "n_cpu_moe")}" must not be above {env.MAX_CPU_LAYERS} (got {layers})')
    return layers


def _overrides(placement: Reader) -> tuple[Override, ...] | None:
    value = placement.get("overrides")
    path = join(placement.path, "overrides")
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise refusal(f'"{path}" must be an array of objects')
    if len(value) > MAX_OVERRIDES:
        raise refusal(f'"{path}" must not hold more than {MAX_OVERRIDES} objects (got {len(value)})')
    return tuple(_override(item, f"{path}[{index}]") for index, item in enumerate(value))


def _override(item: object, path: str) -> Override:
    if not isinstance(item, dict):
        raise refusal(f'"{path}" must be an object with "pattern" and "device"')
    known = children("vllm_cpp.placement.overrides[]")
    values = Reader(item, path, known)
    for key in known:
        if not isinstance(values.get(key), str) or not values.get(key):
            raise refusal(f'"{path}.{key}" must be a non-empty string')
    pattern, device = values.get("pattern"), values.get("device")
    try:
        Pattern(pattern)
    except PatternError as error:
        raise refusal(f'"{path}.pattern" is not a valid regex: {printable(str(error))}') from None
    if device not in DEVICES:
        raise refusal(f'"{path}.device" is "{printable(device)}", which is not a device (expected one of: {" ".join(DEVICES)})')
    if device != "cpu":
        raise refusal(f'"{path}.device" is "{device}", and a placement target must be cpu: what is not placed stays on the device')
    return Override(pattern, device, path=path)


def overrides_from_text(text: str) -> tuple[Override, ...] | None:
    """`pattern=device,…` as the variable holds it; None when any entry is malformed, so that a typo places nothing by half."""
    entries = [entry.partition("=") for entry in text.split(",") if entry]
    if len(entries) > MAX_OVERRIDES:
        return None
    try:
        items = [{"pattern": pattern, "device": device} for pattern, _, device in entries]
        return tuple(_override(item, f"VT_PLACEMENT_OVERRIDES[{index}]") for index, item in enumerate(items)) or None
    except InvalidArgumentError:
        return None
