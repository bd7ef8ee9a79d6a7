"""vLLM's own weight offload: the `offload_backend`, `uva` and `prefetch` half of the document.

Owns: its ranges and their texts, the warning for a backend that disagrees with the fields, which backend results, and which weights and
layers it means. Must not know JSON or any model. This is *weight* offload; KV offload is another subject.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from vllm_cpp.errors import InvalidArgumentError

BACKENDS: Final = ("auto", "uva", "prefetch")


@dataclass(frozen=True, kw_only=True)
class WeightOffload:
    """The validated half. Constructing one refuses what is out of range, in vLLM's order and words."""

    backend: str = "auto"
    cpu_offload_gb: float = 0.0
    cpu_offload_params: frozenset[str] = frozenset()
    group_size: int = 0
    num_in_group: int = 1
    prefetch_step: int = 1
    prefetch_params: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.cpu_offload_gb >= 0:  # NaN compares false
            raise InvalidArgumentError(f"cpu_offload_gb ({self.cpu_offload_gb:f}) must be >= 0")
        if math.isinf(self.cpu_offload_gb):
            raise InvalidArgumentError("cpu_offload_gb (inf) must be finite")
        if self.group_size < 0:
            raise InvalidArgumentError(f"offload_group_size ({self.group_size}) must be >= 0")
        if self.num_in_group < 1:
            raise InvalidArgumentError(f"offload_num_in_group ({self.num_in_group}) must be >= 1")
        if self.prefetch_step < 0:
            raise InvalidArgumentError(f"offload_prefetch_step ({self.prefetch_step}) must be >= 0")
        if self.backend == "prefetch" or self.group_size > 0:
            self._check_prefetch()

    def _check_prefetch(self) -> None:
        if self.num_in_group > self.group_size:
            raise InvalidArgumentError(f"offload_num_in_group ({self.num_in_group}) must be <= offload_group_size ({self.group_size})")
        if self.prefetch_step < 1:
            raise InvalidArgumentError(
                f"offload_prefetch_step ({self.prefetch_step}) must be >= 1 when prefetch offloading is enabled (offload_group_size > 0)"
            )

    @property
    def warning(self) -> str | None:
        """What is ignored because the backend and the fields disagree. The backend wins; it is never a refusal."""
        has_uva, has_prefetch = self.cpu_offload_gb > 0, self.group_size > 0
        if self.backend == "uva" and has_prefetch:
            return "Prefetch offload fields are set but offload_backend='uva'. Prefetch settings will be ignored."
        if self.backend == "prefetch" and has_uva:
            return "UVA offload fields are set but offload_backend='prefetch'. UVA settings will be ignored."
        if self.backend == "auto" and has_uva and has_prefetch:
            return (
                "Both UVA and prefetch offload fields are set with offload_backend='auto'. Prefetch backend will be selected. "
                "Set offload_backend explicitly to suppress this warning."
            )
        return None

    @property
    def resolved_backend(self) -> str | None:
        """uva, prefetch, or None when `auto` finds no budget."""
        if self.backend != "auto":
            return self.backend
        if self.group_size > 0:
            return "prefetch"
        return "uva" if self.cpu_offload_gb > 0 else None

    @property
    def enabled(self) -> bool:
        """Whether the resolved backend has a budget."""
        return {"uva": self.cpu_offload_gb > 0, "prefetch": self.group_size > 0, None: False}[self.resolved_backend]

    @property
    def budget_bytes(self) -> int:
        """The uva budget. It is tested before each weight, never against its size, so it may overshoot by one weight."""
        return math.trunc(self.cpu_offload_gb * 1024**3)

    def offloads_layer(self, layer: int) -> bool:
        """Whether prefetch keeps this layer off the device: the last `num_in_group` of each group of `group_size`."""
        return self.group_size > 0 and layer % self.group_size >= self.group_size - self.num_in_group


def names_weight(segments: Iterable[str], name: str) -> bool:
    """Whether one of `segments` is a run of whole dotted segments of `name`; an empty segment never is.

    An empty *set* is the caller's to interpret: for uva it means any weight, for prefetch every weight of an offloaded layer.
    """
    return any(segment and f".{segment}." in f".{name}." for segment in segments)
