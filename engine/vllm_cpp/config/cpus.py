"""How many cores this process may keep busy.

Owns: the default number of worker threads: physical cores, within the process's affinity and its control group's quota. Worker threads
spin at barriers, so one too many costs more than one too few. Must not know what the threads do.
"""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_QUOTA_V2 = "/sys/fs/cgroup/cpu.max"
_QUOTA_V1 = ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _allowed_cpus() -> set[int]:
    try:
        return set(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not Linux
        return set(range(os.cpu_count() or 1))


def _quota_cores() -> float | None:
    """Cores' worth of time the control group grants, or None when unlimited or unknown."""
    fields = _read(_QUOTA_V2).split() or [_read(path) for path in _QUOTA_V1]
    try:
        quota, period = (int(field) for field in fields)
    except ValueError:  # "max", or nothing to read
        return None
    return quota / period if quota > 0 and period > 0 else None


def physical_cores() -> int:
    """At least 1. Two hardware threads of one core count once; an unreadable topology counts every CPU."""
    cores = {_read(_TOPOLOGY.format(cpu)) or f"cpu {cpu}" for cpu in _allowed_cpus()}
    quota = _quota_cores()
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))
