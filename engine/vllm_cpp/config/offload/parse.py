"""The document's keys, and the order in which its mistakes are named.

Owns: which keys exist at every level, and the refusals that belong to one key. Must not know what is installed or in the environment:
`parse` of equal documents gives equal results, always, and touches no file.

Order: malformed text, unknown top-level keys, unknown keys of `uva`, of `prefetch`, then all of `vllm_cpp`, then the values of vLLM's half.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, Final

from vllm_cpp import env
from vllm_cpp.errors import InvalidArgumentError

from .document import OffloadDocument, Override, ResidencyRequest
from .reader import Reader, join, load, printable, refusal
from .weight_offload import BACKENDS, WeightOffload

_TOP: Final = ("offload_backend", "uva", "prefetch", "vllm_cpp")
_UVA: Final = ("cpu_offload_gb", "cpu_offload_params")
_PREFETCH: Final = ("offload_group_size", "offload_num_in_group", "offload_prefetch_step", "offload_params")
_VLLM_CPP: Final = ("mmap", "expert_stream", "device_fit", "placement")
_MMAP: Final = ("enabled", "prefault")
_EXPERT_STREAM: Final = ("enabled", "slots", "slot_bytes")
_DEVICE_FIT: Final = ("weight_budget_bytes",)
_PLACEMENT: Final = ("overrides", "cpu_moe", "n_cpu_moe", "fit")
_OVERRIDE: Final = ("pattern", "device")

DEVICES: Final = ("cpu", "cuda")
_MAX_PATTERN: Final = 1024
FIT_AND_MANUAL: Final = '"vllm_cpp.placement.fit" cannot be combined with a manual placement ("overrides", "cpu_moe" or "n_cpu_moe")'


def parse(document: str | bytes | dict[str, Any] | None) -> OffloadDocument:
    """Read a document given as JSON text or as a dict. None and blank text are the inert document."""
    top = Reader(load(document), "", _TOP)
    uva = top.child("uva", _UVA)
    prefetch = top.child("prefetch", _PREFETCH)
    residency = _residency(top.child("vllm_cpp", _VLLM_CPP))
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
    mmap = top.child("mmap", _MMAP)
    said: dict[str, Any] = {"mmap": mmap.boolean("enabled"), "prefault": mmap.boolean("prefault")}
    stream = top.child("expert_stream", _EXPERT_STREAM)
    said["expert_stream"] = stream.boolean("enabled")
    said["expert_stream_slots"] = stream.positive("slots")
    said["expert_stream_slot_bytes"] = stream.positive("slot_bytes")
    fit = top.child("device_fit", _DEVICE_FIT)
    said["device_weight_budget_bytes"] = fit.not_negative("weight_budget_bytes", '; 0 means "suppress the device-fit refusal"')
    placement = top.child("placement", _PLACEMENT)
    said["placement_overrides"] = _overrides(placement)
    said["cpu_moe"] = placement.boolean("cpu_moe")
    said["n_cpu_moe"] = _cpu_layers(placement)
    said["placement_fit"] = placement.boolean("fit")
    request = ResidencyRequest(**said)
    if request.placement_fit and request.places_by_hand:
        raise refusal(FIT_AND_MANUAL)
    return request


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
    return tuple(_override(item, f"{path}[{index}]") for index, item in enumerate(value))


def _override(item: object, path: str) -> Override:
    if not isinstance(item, dict):
        raise refusal(f'"{path}" must be an object with "pattern" and "device"')
    values = Reader(item, path, _OVERRIDE)
    for key in _OVERRIDE:
        if not isinstance(values.get(key), str) or not values.get(key):
            raise refusal(f'"{path}.{key}" must be a non-empty string')
    pattern, device = values.get("pattern"), values.get("device")
    wrong = wrong_pattern(pattern)
    if wrong is not None:
        raise refusal(f'"{path}.pattern" is not a valid regex: {wrong}')
    if device not in DEVICES:
        raise refusal(f'"{path}.device" is "{printable(device)}", which is not a device (expected one of: {" ".join(DEVICES)})')
    if device != "cpu":
        raise refusal(f'"{path}.device" is "{device}", and a placement target must be cpu: what is not placed stays on the device')
    return Override(pattern, device)


def wrong_pattern(pattern: str) -> str | None:
    """Why this is no usable regex, or None when it is one."""
    if len(pattern) > _MAX_PATTERN:
        return f"{len(pattern)} characters, and a pattern may have {_MAX_PATTERN}"
    try:
        with warnings.catch_warnings():  # a dubious pattern must not make Python speak on stderr
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except RecursionError:
        return "nested too deeply"
    except (re.error, OverflowError) as error:
        return printable(str(error))
    return None


def overrides_from_text(text: str) -> tuple[Override, ...] | None:
    """`pattern=device,…` as the variable holds it; None when any entry is malformed, so that a typo places nothing by half."""
    entries = [entry.partition("=") for entry in text.split(",") if entry]
    try:
        items = [{"pattern": pattern, "device": device} for pattern, _, device in entries]
        return tuple(_override(item, "") for item in items) or None
    except InvalidArgumentError:
        return None
