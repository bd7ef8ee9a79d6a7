"""Lanes that read real files: every byte where it belongs, and every way a read can end badly."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from residency.driving import Engine, sources
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.kernels.cpu import slots as kernel
from vllm_cpp.residency import disk, files
from vllm_cpp.residency.lanes import Lanes
from vllm_cpp.residency.slots import SlotStore

LAYERS, TOWERS, EXPERTS, SLICE_BYTES, FIRST = 3, 3, 8, 5001, 96
PATIENCE_S = 60


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """The last slice ends the file, inside a page."""
    path = tmp_path / "towers.bin"
    path.write_bytes(np.random.default_rng(1).bytes(FIRST + LAYERS * TOWERS * EXPERTS * SLICE_BYTES))
    return path


class Reading:
    """A store with lanes, and an engine on a file."""

    def __init__(self, path: Path | str, num_slots: int, *, direct: bool, lanes: int = 2) -> None:
        self.store = SlotStore(num_slots, SLICE_BYTES)
        self.lanes = Lanes(self.store, lanes)
        self.engine = Engine(self.store, sources(str(path), LAYERS, TOWERS, EXPERTS, slice_bytes=SLICE_BYTES, first=FIRST), direct=direct)
        self.file = self.engine.model.layers[0].towers[0].file

    def ask(self, layer: int, experts: list[int], engine: Engine | None = None) -> dict[tuple[int, int], bytes | int]:
        """The bytes of each slice, or the state of one that could not be read."""
        engine = engine or self.engine
        engine.ask(layer, experts)
        found: dict[tuple[int, int], bytes | int] = {}
        for t in range(TOWERS):
            for e in experts:
                address, state = wait(engine, layer, t, e)
                found[t, e] = bytes_at(address, SLICE_BYTES) if state == kernel.READY else state
        return found


def wait(engine: Engine, layer: int, tower: int, expert: int) -> tuple[int, int]:
    until = time.monotonic() + PATIENCE_S
    while (place := engine.place(layer, tower, expert))[1] == kernel.FILLING:
        assert time.monotonic() < until, "no lane read it"
        time.sleep(0.0002)
    return place


def bytes_at(address: int, size: int) -> bytes:
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * size).from_address(address)).tobytes()


def expected(path: Path, layer: int, tower: int, expert: int) -> bytes:
    return slice_of(path.read_bytes(), layer, tower, expert)


def slice_of(data: bytes, layer: int, tower: int, expert: int) -> bytes:
    start = FIRST + ((layer * TOWERS + tower) * EXPERTS + expert) * SLICE_BYTES
    return data[start : start + SLICE_BYTES]


@pytest.fixture
def reading() -> Iterator[list[Reading]]:
    """Whatever a test puts in is taken down."""
    all_of_them: list[Reading] = []
    yield all_of_them
    for one in all_of_them:
        one.lanes.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("lanes", [1, 3])
def test_every_slice_is_the_files(model_file: Path, reading: list[Reading], direct: bool, lanes: int) -> None:
    r = Reading(model_file, LAYERS * TOWERS * EXPERTS, direct=direct, lanes=lanes)
    reading.append(r)
    assert r.file.reads_directly == (direct and can_read_directly(model_file))
    for layer in range(LAYERS):
        got = r.ask(layer, list(range(EXPERTS)))
        assert got == {(t, e): expected(model_file, layer, t, e) for t in range(TOWERS) for e in range(EXPERTS)}
    counted = r.store.counters.as_dict()
    assert counted["fills"] == LAYERS * TOWERS * EXPERTS
    assert counted["bytes"] == counted["fills"] * SLICE_BYTES


def can_read_directly(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_direct_reads_that_are_refused_at_open_are_buffered(
    model_file: Path, reading: list[Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, flags: int) -> int:
        assert flags & os.O_DIRECT
        raise OSError(errno.EINVAL, "no direct reads here", path)

    monkeypatch.setattr(files.os, "open", refuse)
    with open(model_file, "rb") as file:  # noqa: PTH123 - pathlib opens through the function that is replaced
        refused = files.OpenFile(str(model_file), file.fileno(), direct=True)
        assert not refused.reads_directly
        refused.close()


def test_direct_reads_that_are_refused_at_the_first_read_are_buffered(model_file: Path, reading: list[Reading]) -> None:
    """Memory that is not aligned is what file systems with direct reads refuse."""
    r = Reading(model_file, 12, direct=True)
    reading.append(r)
    refuses = r.file.reads_directly and refuses_misaligned_memory(model_file)
    record = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * kernel.STORE_WORDS).from_address(r.store.address))
    record[kernel.STORE_ARENA] += 8
    assert r.ask(0, [2, 5]) == {(t, e): expected(model_file, 0, t, e) for t in range(TOWERS) for e in (2, 5)}
    assert r.file.reads_directly != refuses


def refuses_misaligned_memory(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        block = np.zeros(3 * 4096, np.uint8)
        start = -block.ctypes.data % 4096 + 8
        os.preadv(fd, [block[start : start + 4096]], 0)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_shrinks_fails_the_step_by_name_and_serves_on(model_file: Path, reading: list[Reading], direct: bool) -> None:
    data = model_file.read_bytes()
    r = Reading(model_file, LAYERS * TOWERS * EXPERTS, direct=direct)
    reading.append(r)
    os.truncate(model_file, len(data) // 2)
    got = r.ask(2, [0, 3])
    assert set(got.values()) == {kernel.ENDED}
    r.engine.ask(0, [0])  # the step is lost: nothing more is asked for
    assert r.engine.visit.wave_experts == []
    r.engine.end_step()
    failure = r.engine.visit.take_failure()
    assert failure is not None
    assert failure.state == kernel.ENDED
    assert failure.expert in (0, 3)
    tower = r.engine.model.tower_at(failure.tower)
    assert tower is not None
    assert tower.source.name.startswith("blk.2.tower")
    assert r.engine.visit.take_failure() is None
    assert (r.store.occupied, r.store.in_use) == (0, 0)
    assert r.ask(0, [1]) == {(t, 1): slice_of(data, 0, t, 1) for t in range(TOWERS)}
    model_file.write_bytes(data)
    assert r.ask(2, [0, 3]) == {(t, e): slice_of(data, 2, t, e) for t in range(TOWERS) for e in (0, 3)}


def test_a_read_error_fails_the_step_with_its_number(reading: list[Reading]) -> None:
    """A process's own memory is a file: reading what is not mapped, as its first page is not, is an input/output error."""
    r = Reading("/proc/self/mem", 9, direct=True)
    reading.append(r)
    assert set(r.ask(0, [0]).values()) == {-errno.EIO}
    r.engine.end_step()
    failure = r.engine.visit.take_failure()
    assert failure is not None
    assert failure.state == -errno.EIO
    assert r.store.occupied == 0
    counted = r.store.counters.as_dict()
    assert (counted["fills"], counted["bytes"]) == (3, 0)


def test_exhausted_slots_are_read_in_place_unless_the_file_has_shrunk(model_file: Path, reading: list[Reading]) -> None:
    data = np.frombuffer(model_file.read_bytes(), np.uint8)
    r = Reading(model_file, 2, direct=False)
    reading.append(r)
    with_mapping = Engine(
        r.store, sources(str(model_file), LAYERS, TOWERS, EXPERTS, slice_bytes=SLICE_BYTES, first=FIRST), mapped=data.ctypes.data + FIRST
    )  # fmt: skip
    got = r.ask(1, [4], with_mapping)
    assert got == {(t, 4): expected(model_file, 1, t, 4) for t in range(TOWERS)}
    counted = r.store.counters.as_dict()
    assert (counted["misses"], counted["fills"], counted["exhausted"]) == (3, 2, 1)
    os.truncate(model_file, 4096)
    with_mapping.ask(2, [1])
    assert with_mapping.visit.wave_experts == []  # nothing may touch the mapping
    with_mapping.end_step()
    failure = with_mapping.visit.take_failure()
    assert failure is not None
    assert failure.state == kernel.ENDED


def test_engines_in_threads_find_their_own_bytes_while_slots_are_scarce(model_file: Path, reading: list[Reading]) -> None:
    r = Reading(model_file, 31, direct=True, lanes=3)
    reading.append(r)
    data = model_file.read_bytes()
    wrong: list[str] = []

    def run(number: int) -> None:
        rng = random.Random(number)
        engine = Engine(r.store, sources(str(model_file), LAYERS, TOWERS, EXPERTS, slice_bytes=SLICE_BYTES, first=FIRST))
        for step in range(60):
            layer, experts = step % LAYERS, rng.sample(range(EXPERTS), rng.randint(1, 3))
            for (t, e), got in r.ask(layer, experts, engine).items():
                if got != slice_of(data, layer, t, e):
                    wrong.append(f"engine {number}: layer {layer}, tower {t}, expert {e}")
        engine.visit.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []
    counted = r.store.counters.as_dict()
    assert counted["exhausted"] == 0  # three engines use at most 27 slots at a time
    assert counted["evictions"] > 0
    assert counted["bytes"] == counted["fills"] * SLICE_BYTES
    assert r.store.in_use == 0


def test_lanes_end_when_they_are_closed(model_file: Path) -> None:
    r = Reading(model_file, 9, direct=False, lanes=4)
    assert sum(thread.name.startswith("vllm-lane-") for thread in threading.enumerate()) >= 4
    r.lanes.close()
    assert not any(thread.is_alive() for thread in r.lanes.threads)
    with pytest.raises(ValueError, match="at least one lane, not 0"):
        Lanes(r.store, 0)


def test_the_number_of_lanes_is_the_fewest_that_come_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {4: 0.95e9, 8: 1.0e9, 16: 0.9e9}
    monkeypatch.setattr(disk, "read_rate", lambda fd, offsets, n_bytes, lanes, patience_s: rates[lanes])
    assert disk.best_lanes(-1, range(1000), 4096) == 4
    rates[8] = 2.0e9
    assert disk.best_lanes(-1, range(1000), 4096) == 8
    assert disk.best_lanes(-1, range(3), 4096) == disk.DEFAULT_LANES  # too few slices to tell


def test_a_rate_is_measured_and_a_refusal_measures_nothing(model_file: Path) -> None:
    with model_file.open("rb") as file:
        assert disk.read_rate(file.fileno(), [0, 4096, 8192], 4096, 2) > 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.read_rate(-1, [0, 4096], 4096, 2)
    assert disk.best_lanes(-1, [0] * 100, 4096) == disk.DEFAULT_LANES


def test_a_lane_that_cannot_start_is_refused_and_leaves_none(monkeypatch) -> None:
    start = threading.Thread.start

    def starts_two(thread: threading.Thread) -> None:
        if thread.name == "vllm-lane-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts_two)
    before = set(threading.enumerate())
    with pytest.raises(ModelLoadError, match=r"no thread for read lane 3 of 4: can't start new thread; lower VT_MOE_EXPERT_STREAM_LANES"):
        Lanes(SlotStore(1, SLICE_BYTES), 4)
    assert set(threading.enumerate()) <= before
