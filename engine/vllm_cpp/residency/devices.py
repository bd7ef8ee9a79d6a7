"""A device, as far as weights are concerned.

Owns: the few facts that decide where weights may live. Must not know how a device is driven or what computes on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Device:
    """`total_bytes` is the memory that weights are staged into, None where nothing reports it. `stages_weights`: loading copies them into
    that memory. `host_addressable`: its kernels read host memory in place (pageable access on an integrated part)."""

    name: str
    total_bytes: int | None
    stages_weights: bool
    host_addressable: bool


CPU: Final = Device(name="cpu", total_bytes=None, stages_weights=False, host_addressable=True)


def find(name: str) -> Device:
    """The device of this name that this build drives; "auto" is the best one there is. KeyError for any other."""
    return {"auto": CPU, "cpu": CPU}[name]
