"""Every key of the offload document, one row each.

Owns: the names at every level and their order in refusals, and what the documentation says of each. The parser asks it which keys exist,
and docs/weight-offload.md is written from it, so neither can drift. Must not know how a value is read or carried out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

INERT: Final = "nothing to do, and says so: the CPU is the engine's own device"
FREES_NOTHING: Final = "refused once a backend has a budget: the weights are in host memory already"


@dataclass(frozen=True)
class Key:
    """One key. `field` is its name in the start-up line and the key to its variable; "" for vLLM's own half, which has neither."""

    path: str
    kind: str
    default: str
    rule: str
    doc: str
    on_cpu: str
    field: str = ""


KEYS: Final = (
    Key("offload_backend", "string", "auto", "auto, uva or prefetch", "which backend moves weights off the device", FREES_NOTHING),
    Key("uva.cpu_offload_gb", "number", "0", ">= 0", "GiB of weights to keep in host memory and read in place", FREES_NOTHING),
    Key(
        "uva.cpu_offload_params",
        "array of strings",
        "[]",
        "whole name segments",
        "which weights; none named: any, until the budget is spent",
        FREES_NOTHING,
    ),
    Key("prefetch.offload_group_size", "integer", "0", ">= 0", "layers in a group; above 0 it enables prefetch", FREES_NOTHING),
    Key(
        "prefetch.offload_num_in_group",
        "integer",
        "1",
        "1 to the group size",
        "how many layers at the end of each group are kept in host memory",
        FREES_NOTHING,
    ),
    Key(
        "prefetch.offload_prefetch_step",
        "integer",
        "1",
        ">= 0; >= 1 when enabled",
        "how many offloaded layers ahead are copied in",
        FREES_NOTHING,
    ),
    Key(
        "prefetch.offload_params",
        "array of strings",
        "[]",
        "whole name segments",
        "which weights of those layers; none named: all of them",
        FREES_NOTHING,
    ),
    Key("vllm_cpp.mmap.enabled", "boolean", "true", "", "use weights in place from the file's mapping; off copies them", "acts", "mmap"),
    Key(
        "vllm_cpp.mmap.prefault",
        "boolean",
        "true while the borrowed bytes fit in available memory",
        "",
        "read the mapping in while loading",
        "acts; skipped, and says so, where they do not fit",
        "prefault",
    ),
    Key(
        "vllm_cpp.expert_stream.enabled",
        "boolean",
        "false",
        "",
        "keep routed experts on disk and page slices into an arena",
        "acts",
        "expert_stream",
    ),
    Key("vllm_cpp.expert_stream.slots", "integer", "64", "> 0", "slots of the arena", "acts while streaming", "expert_stream_slots"),
    Key(
        "vllm_cpp.expert_stream.slot_bytes",
        "integer",
        "the largest slice of the file",
        "> 0",
        "bytes of a slot",
        "acts while streaming",
        "expert_stream_slot_bytes",
    ),
    Key(
        "vllm_cpp.device_fit.weight_budget_bytes",
        "integer",
        "the device's memory",
        ">= 0; 0 suppresses the refusal",
        "bytes of weights a device may stage",
        "no check: nothing is staged",
        "device_weight_budget_bytes",
    ),
    Key(
        "vllm_cpp.placement.overrides",
        "array of objects",
        "[]",
        "at most 256",
        "which tensors' experts are computed on which device; the first that matches wins",
        INERT,
        "placement_overrides",
    ),
    Key(
        "vllm_cpp.placement.overrides[].pattern",
        "string",
        "",
        "a regular expression, found anywhere in a tensor's name",
        "which tensors",
        INERT,
    ),
    Key("vllm_cpp.placement.overrides[].device", "string", "", "cpu", "where they are computed", INERT),
    Key("vllm_cpp.placement.cpu_moe", "boolean", "false", "", "compute every routed expert on the CPU", INERT, "cpu_moe"),
    Key("vllm_cpp.placement.n_cpu_moe", "integer", "unset", "0 to 4096", "the same for the first N layers only", INERT, "n_cpu_moe"),
    Key(
        "vllm_cpp.placement.fit",
        "boolean",
        "false",
        "not with the three above",
        "move whole layers' experts to the CPU, the last first, until the rest fits the budget",
        INERT,
        "placement_fit",
    ),
)


def children(path: str) -> tuple[str, ...]:
    """The names one level below `path` ("" is the whole document), in their order."""
    start = f"{path}." if path else ""
    below = (key.path[len(start) :] for key in KEYS if key.path.startswith(start))
    return tuple(dict.fromkeys(name.partition(".")[0].removesuffix("[]") for name in below))
