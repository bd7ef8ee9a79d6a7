"""How fast slices can be read, and by how many lanes.

Owns the measurement: reads of the sizes and places that streaming will make, by threads as it will have them. Must not know the store.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm_cpp.kernels.cpu.slots import ALIGNMENT

DEFAULT_LANES: Final = 4
"""Where nothing can be measured: most drives are busy with four reads at a time."""
_CANDIDATES: Final = (4, 8, 16)  # fewer may reach the same rate while nothing else runs, but leave the drive idle between two reads
_READS: Final = 32  # for each of them
_PATIENCE_S: Final = 0.3  # for all of them: a slow disk shall not hold up a load
_MEASURING_S: Final = 0.5  # for a rate that is to be told
_PLACES: Final = 100_000  # more than any drive reads in that time
_KNEE: Final = 0.9  # fewer lanes are taken when they reach this part of the best rate: each costs a wake-up


def read_rate(fd: int, offsets: Sequence[int], n_bytes: int, lanes: int, patience_s: float = 10.0) -> float:
    """Bytes a second of reading `n_bytes` at each of the offsets, or at as many as the patience lasts for. OSError where a read is
    refused."""
    places, lock, problems = iter(offsets), threading.Lock(), []
    done = [0] * lanes
    start = time.perf_counter()

    def lane(number: int) -> None:
        with mmap.mmap(-1, n_bytes) as memory, memoryview(memory) as view:
            while time.perf_counter() - start < patience_s:
                with lock:
                    place = next(places, None)
                if place is None:
                    return
                try:
                    done[number] += os.preadv(fd, [view], place)
                except OSError as problem:
                    problems.append(problem)
                    return

    threads = [threading.Thread(target=lane, args=(number,), name="vllm-read-rate") for number in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return sum(done) / (time.perf_counter() - start)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came out, by how many lanes, and how long it took to find out."""

    bytes_per_s: float
    lanes: int
    seconds: float


def measure(fd: int, towers: Sequence[tuple[int, int, int]], n_bytes: int, lanes: int) -> Measured:
    """Reads of `n_bytes` at randomly drawn slices of towers, given as (offset of the first slice, bytes of one, how many). `fd` must read
    past the page cache. OSError where a read is refused."""
    draw = random.Random(0)
    places = [(first + draw.randrange(count) * size) & -ALIGNMENT for first, size, count in draw.choices(towers, k=_PLACES)]
    start = time.perf_counter()
    rate = read_rate(fd, places, n_bytes, lanes, _MEASURING_S)
    return Measured(rate, lanes, time.perf_counter() - start)


def best_lanes(fd: int, offsets: Sequence[int], n_bytes: int) -> int:
    """How many lanes to read with: the fewest that come near the best rate. `fd` must read past the page cache, or memory is measured."""
    rates: dict[int, float] = {}
    start, following = time.perf_counter(), iter(offsets)
    for lanes in _CANDIDATES:
        left = _PATIENCE_S - (time.perf_counter() - start)
        places = [place for _, place in zip(range(_READS), following, strict=False)]
        if left <= 0 or len(places) < lanes:
            break
        try:
            rates[lanes] = read_rate(fd, places, n_bytes, lanes, left)
        except OSError:
            return DEFAULT_LANES
    if len(rates) < 2:
        return DEFAULT_LANES
    return min(lanes for lanes, rate in rates.items() if rate >= _KNEE * max(rates.values()))
