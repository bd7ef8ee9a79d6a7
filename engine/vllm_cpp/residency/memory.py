"""How much memory can still be taken without pushing out what is in use, and the taking of large pieces of it.

Owns: the number, asking for large pages, and how fast memory is read. Must not know what memory is for.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

import numpy as np

_MEMINFO: Final = "/proc/meminfo"
_CGROUP: Final = "/sys/fs/cgroup"
_OWN_GROUPS: Final = "/proc/self/cgroup"
_MEASURED_BYTES: Final = 256 << 20
_PASSES: Final = 4
_UNLIMITED: Final = 1 << 60  # version 1 control groups say "no limit" with a huge number


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 - a Path interns its parts, and each engine asks for dozens
            return file.read()
    except (OSError, ValueError):
        return ""


def _fields(path: str) -> dict[str, int]:
    """`name value` lines, with or without a colon and a unit."""
    rows = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _own_groups() -> dict[str, list[str]]:
    """The control groups this process is in, by controller ("" is version 2's tree), each with its ancestors, the nearest first: a limit
    binds all that is below it. A container may show a path that its own mount does not have; the mount's root is its group then."""
    groups: dict[str, list[str]] = {"": ["/"], "memory": ["/"]}
    for row in _text(_OWN_GROUPS).splitlines():
        _, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(","):
            if name in groups:
                here = PurePosixPath(path)
                groups[name] = [str(group) for group in (here, *here.parents)]
    return groups


def _group_headroom() -> int | None:
    """The least that a control group leaves."""
    return min((room for _, room in _group_limits()), default=None)


def _group_limits() -> list[tuple[int, int]]:
    """(limit, what it leaves) of every control group that has one. Its page cache counts as free, as MemAvailable counts the machine's."""
    groups, limits = _own_groups(), []
    for root, controller, limit_file, used_file, cache_field in (
        (_CGROUP, "", "memory.max", "memory.current", "file"),
        (f"{_CGROUP}/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        for group in groups[controller]:
            folder = root + group.rstrip("/")
            limit, used = _text(f"{folder}/{limit_file}").strip(), _text(f"{folder}/{used_file}").strip()
            if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
                cache = _fields(f"{folder}/memory.stat").get(cache_field, 0)
                limits.append((int(limit), max(0, int(limit) - int(used) + cache)))
    return limits


def group_limit_bytes() -> int | None:
    """The least memory limit of the control groups this process is in; None where they have none."""
    return min((limit for limit, _ in _group_limits()), default=None)


@dataclass(frozen=True, slots=True)
class Measured:
    """How fast memory was read, by how many threads, and how long it took to find out."""

    bytes_per_s: float
    threads: int
    seconds: float


def measure(threads: int, room_bytes: int) -> Measured | None:
    """Read memory that no cache holds, `room_bytes` at most; None where there is too little room for that. The best of a few passes."""
    num_values = min(_MEASURED_BYTES, room_bytes) // 4
    if num_values * 4 < _MEASURED_BYTES // 8:
        return None
    start = time.perf_counter()
    parts = np.array_split(np.ones(num_values, np.float32), threads)
    best = math.inf
    for _ in range(_PASSES):
        readers = [threading.Thread(target=np.max, args=(part,), name="vllm-memory-rate") for part in parts]
        begin = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        best = min(best, time.perf_counter() - begin)
    return Measured(num_values * 4 / best, threads, time.perf_counter() - start)


def take(n_bytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone, page by page as it is touched, on large pages where the system has some: small ones cost kernels
    that stream through gigabytes a fifth of their speed. OSError where there is no room for it."""
    memory = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def available_bytes() -> int | None:
    """Bytes that can be taken, page cache counted as free; None where the system does not say."""
    return min((room for room in (machine_headroom(), _group_headroom()) if room is not None), default=None)


def machine_headroom() -> int | None:
    """The same of the machine alone, whatever control groups leave of it."""
    kib = _fields(_MEMINFO).get("MemAvailable")
    return None if kib is None else kib * 1024
