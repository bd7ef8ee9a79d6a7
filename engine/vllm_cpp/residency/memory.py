"""How much memory can still be taken without pushing out what is in use.

Owns: the number. Must not know what it is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = "/proc/meminfo"
_CGROUP: Final = "/sys/fs/cgroup"
_UNLIMITED: Final = 1 << 60  # version 1 control groups say "no limit" with a huge number


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def _fields(path: str) -> dict[str, int]:
    """`name value` lines, with or without a colon and a unit."""
    rows = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _group_headroom() -> int | None:
    """What the control group leaves. Its page cache counts as free, as MemAvailable counts the machine's."""
    for limit_file, used_file, cache_field in (
        ("memory.max", "memory.current", "file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_cache"),
    ):
        limit, used = _text(f"{_CGROUP}/{limit_file}").strip(), _text(f"{_CGROUP}/{used_file}").strip()
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
            stat_file = str(Path(limit_file).parent / "memory.stat")
            cache = _fields(f"{_CGROUP}/{stat_file}").get(cache_field, 0)
            return max(0, int(limit) - int(used) + cache)
    return None


def available_bytes() -> int | None:
    """Bytes that can be taken, page cache counted as free; None where the system does not say."""
    machine = _fields(_MEMINFO).get("MemAvailable")
    known = [value for value in (None if machine is None else machine * 1024, _group_headroom()) if value is not None]
    return min(known, default=None)
