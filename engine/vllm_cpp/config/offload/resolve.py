"""What is in force: environment > document > default, field by field.

Owns: the defaults, and what counts as a variable that wins (one its kind can read). Must not keep state: the request and the decisions
already taken are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vllm_cpp import env
from vllm_cpp.errors import ModelLoadError

from .document import VARIABLES, Override, ResidencyRequest
from .parse import FIT_AND_MANUAL, overrides_from_text

DEFAULT_SLOTS: Final = 64
DEFAULT_STATS_EVERY: Final = 16
REFERENCE: Final = "VT_CPU_REF=1"
NO_BLOCKS: Final = "VT_GGUF_KEEP_QUANT=0"


@dataclass(frozen=True, kw_only=True)
class Residency:
    """The answer for one engine.

    prefault None is the default: only while the borrowed bytes fit in available memory. slot_bytes None is the largest slice of the file.
    device_weight_budget_bytes None is the device's own memory, 0 no check. `placement` is the manual placement, desugared: the first match
    wins. `expand` says why weights are made float32 while loading, "" that they are not; `reference`, that all of them are, and the KV
    cache with them.
    """

    mmap: bool = True
    prefault: bool | None = None
    expert_stream: bool = False
    expert_stream_slots: int = DEFAULT_SLOTS
    expert_stream_slot_bytes: int | None = None
    expert_stream_stats_every: int = DEFAULT_STATS_EVERY
    device_weight_budget_bytes: int | None = None
    placement: tuple[Override, ...] = ()
    placement_fit: bool = False
    expand: str = ""

    @property
    def reference(self) -> bool:
        return self.expand == REFERENCE


def from_environment(field: str) -> object:
    """The value this field's variable would win with, or None when it is unset or ignored."""
    value = env.get(VARIABLES[field])
    if field == "placement_overrides" and isinstance(value, str):
        return overrides_from_text(value)
    return value


def overridden(request: ResidencyRequest) -> list[str]:
    """The said fields whose variable wins, as `VARIABLE (field)`."""
    return [f"{VARIABLES[field]} ({field})" for field in request.said() if from_environment(field) is not None]


def with_environment(request: ResidencyRequest) -> ResidencyRequest:
    """The request with every winning variable laid over it."""
    winners = {field: value for field in VARIABLES if (value := from_environment(field)) is not None}
    return ResidencyRequest(**winners).over(request)


def resolved(request: ResidencyRequest) -> Residency:
    """What this request amounts to under the present environment."""
    final = with_environment(request)
    if final.placement_fit and final.places_by_hand:
        # Each source was fine by itself; together (an earlier document, or a variable) they are not.
        raise ModelLoadError(
            f"offload config: {FIT_AND_MANUAL}: one stands in this document or an earlier one of this process, or in the environment; "
            'turn "fit" off, or the manual placement'
        )
    stats_every = env.number("VT_MOE_EXPERT_STREAM_STATS_EVERY")
    return Residency(
        mmap=True if final.mmap is None else final.mmap,
        prefault=final.prefault,
        expert_stream=bool(final.expert_stream),
        expert_stream_slots=final.expert_stream_slots or DEFAULT_SLOTS,
        expert_stream_slot_bytes=final.expert_stream_slot_bytes,
        expert_stream_stats_every=DEFAULT_STATS_EVERY if stats_every is None else stats_every,
        device_weight_budget_bytes=final.device_weight_budget_bytes,
        placement=final.desugared(),
        placement_fit=bool(final.placement_fit),
        expand=REFERENCE if env.switch("VT_CPU_REF") else NO_BLOCKS if env.switch("VT_GGUF_KEEP_QUANT") is False else "",
    )
