"""What a document says, after it was read.

Owns: the fields of the `vllm_cpp` half, each with its path, its variable and its name in the start-up line, and the merge of two requests.
Must not know JSON, the environment's values, or what any field does.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Final

from .weight_offload import WeightOffload

EXPERT_TOWERS: Final = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Matches the name of every routed-expert tower, in any layer."""


@dataclass(frozen=True)
class Override:
    """Tensors whose name `pattern` finds (anywhere in it) are computed on `device`."""

    pattern: str
    device: str
    path: str = field(default="", compare=False)  # where it was said, for what is said of it
    layer: int | None = field(default=None, compare=False)  # the one layer it is about, where its text says no more than that


@dataclass(frozen=True, kw_only=True)
class ResidencyRequest:
    """The `vllm_cpp` half. None is "not said", which leaves what was said before; an empty tuple of overrides is said."""

    mmap: bool | None = None
    prefault: bool | None = None
    expert_stream: bool | None = None
    expert_stream_slots: int | None = None
    expert_stream_slot_bytes: int | None = None
    device_weight_budget_bytes: int | None = None
    cpu_moe: bool | None = None
    n_cpu_moe: int | None = None
    placement_fit: bool | None = None
    placement_overrides: tuple[Override, ...] | None = None

    def said(self) -> dict[str, object]:
        """The fields that were said, in the order of the start-up line."""
        return {name: value for name in VARIABLES if (value := getattr(self, name)) is not None}

    def described(self) -> str:
        """The fields that were said, as the start-up line shows them; "" when none was."""
        return " ".join(f"{name}={_shown(value)}" for name, value in self.said().items())

    def over(self, older: ResidencyRequest) -> ResidencyRequest:
        """This request laid over an older one, field by field."""
        return dataclasses.replace(older, **self.said())

    @property
    def places_by_hand(self) -> bool:
        """Whether any of the three manual placement fields places something."""
        return bool(self.placement_overrides or self.cpu_moe or self.n_cpu_moe)

    def desugared(self) -> tuple[Override, ...]:
        """The manual placement as one list. The first match wins, so what was spelled out stands before what was abbreviated."""
        everywhere = (Override(EXPERT_TOWERS, "cpu", path="vllm_cpp.placement.cpu_moe"),) if self.cpu_moe else ()
        path = "vllm_cpp.placement.n_cpu_moe"
        layers = tuple(Override(rf"blk\.{il}{EXPERT_TOWERS}", "cpu", path=path, layer=il) for il in range(self.n_cpu_moe or 0))
        return (self.placement_overrides or ()) + everywhere + layers


VARIABLES: Final[dict[str, str]] = {
    "mmap": "VT_GGUF_MMAP",
    "prefault": "VT_GGUF_PREFAULT",
    "expert_stream": "VT_MOE_EXPERT_STREAM",
    "expert_stream_slots": "VT_MOE_EXPERT_STREAM_SLOTS",
    "expert_stream_slot_bytes": "VT_MOE_EXPERT_STREAM_SLOT_BYTES",
    "device_weight_budget_bytes": "VT_DEVICE_WEIGHT_BUDGET_BYTES",
    "cpu_moe": "VT_CPU_MOE",
    "n_cpu_moe": "VT_N_CPU_MOE",
    "placement_fit": "VT_PLACEMENT_FIT",
    "placement_overrides": "VT_PLACEMENT_OVERRIDES",
}
"""Every field of a request and its environment twin, in the order of the start-up line."""


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(len(value) if isinstance(value, tuple) else value)


@dataclass(frozen=True, kw_only=True)
class OffloadDocument:
    """A whole document: where weights live (`vllm_cpp`) and vLLM's own weight offload."""

    residency: ResidencyRequest = field(default_factory=ResidencyRequest)
    weight_offload: WeightOffload = field(default_factory=WeightOffload)
