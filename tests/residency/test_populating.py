"""Memory for the arena ahead of its slices: which pages are there, when it stops, and that it changes nothing in them."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import vllm_cpp
from residency.driving import Engine, finish_reads, sources
from vllm_cpp.config.offload.install import reset as reset_documents
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.kernels.cpu import reads
from vllm_cpp.residency import populating, streaming
from vllm_cpp.residency.lanes import Lanes
from vllm_cpp.residency.populating import Populating
from vllm_cpp.residency.slots import SlotStore, taking_order

MIB = 1 << 20
LARGE_PAGE = 2 * MIB
SLICE_BYTES = MIB - 4096  # and its alignment: a cell of 1 MiB
AHEAD = 16 * MIB


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populating, "AHEAD_BYTES", AHEAD)
    monkeypatch.setattr(populating, "PIECE_BYTES", 4 * MIB)


@pytest.fixture
def store() -> SlotStore:
    return SlotStore(400, SLICE_BYTES)


@pytest.fixture
def populate() -> Iterator[list[Populating]]:
    """Whatever a test puts in is ended."""
    begun: list[Populating] = []
    yield begun
    for one in begun:
        one.close()


def resident(store: SlotStore) -> np.ndarray:
    """Which pages of the arena are in memory."""
    pages = np.zeros(-(-store.arena_bytes // os.sysconf("SC_PAGE_SIZE")), np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(store.arena_address, store.arena_bytes, pages.ctypes.data) == 0
    return (pages & 1).astype(bool)


def resident_bytes(store: SlotStore) -> int:
    return int(resident(store).sum()) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("num_slots", "cell"), [(1, 4096), (7, 4096), (50000, 4096), (3718, 557056), (400, MIB), (99, 3 * MIB)])
def test_slots_that_are_taken_one_after_the_other_share_no_large_page(num_slots, cell):
    order, stretch = taking_order(num_slots, cell)
    assert sorted(order) == list(range(num_slots))
    stretches = order // stretch
    assert (np.diff(stretches) >= 0).all(), "a stretch is filled before the next one is begun"
    between = (np.abs(np.diff(order.astype(np.int64))) - 1) * cell
    whole = (np.diff(stretches) == 0) & (stretches[1:] < num_slots // stretch)  # the last stretch may be too short for that
    assert (between[whole] >= LARGE_PAGE).all()
    assert whole.any() or num_slots < stretch


def test_an_empty_arena_gets_its_first_pages_and_no_more(store, populate):
    assert resident_bytes(store) == 0
    populate.append(Populating(store, store.num_slots))
    populate[0].end_step()  # the first step ends when it is done
    populate[0].close()
    pages = resident(store)
    assert pages[: AHEAD // 4096].all()
    assert AHEAD <= pages.sum() * 4096 <= AHEAD + LARGE_PAGE


def test_it_goes_on_behind_the_slots_that_are_taken(store, populate, tmp_path, monkeypatch):
    monkeypatch.setattr(populating, "AHEAD_BYTES", 96 * MIB)
    path = tmp_path / "towers"
    path.touch()
    os.truncate(path, 2 * 100 * SLICE_BYTES)
    engine = Engine(store, sources(str(path), 1, 2, 100, slice_bytes=SLICE_BYTES))
    populate.append(Populating(store, store.num_slots))
    populate[0].end_step()
    engine.ask(0, range(60))
    finish_reads(store)
    engine.end_step()
    used, first = store.occupied, store.taken_bytes(store.occupied)
    ahead = used * MIB + 96 * MIB
    assert 96 * MIB + LARGE_PAGE < first < ahead < store.arena_bytes
    populate[0].end_step()
    populate[0]._catch_up()
    populate[0].close()
    pages = resident(store)
    assert pages[first // 4096 : ahead // 4096].all()
    assert not pages[(ahead + LARGE_PAGE) // 4096 :].any()
    assert not pages[(96 * MIB + LARGE_PAGE) // 4096 : (first - LARGE_PAGE) // 4096].any(), "these are the reads' own"


def test_where_reads_have_taken_every_slot_the_thread_ends(store, populate, tmp_path):
    path = tmp_path / "towers"
    path.touch()
    os.truncate(path, 400 * SLICE_BYTES)
    populate.append(Populating(store, store.num_slots))
    populate[0].end_step()
    engine = Engine(store, sources(str(path), 1, 1, 400, slice_bytes=SLICE_BYTES))
    engine.ask(0, range(400))
    finish_reads(store)
    engine.end_step()
    populate[0].end_step()
    populate[0]._thread.join(60)
    assert populate[0].over
    assert not populate[0]._thread.is_alive()
    assert resident_bytes(store) <= AHEAD + LARGE_PAGE
    store.close_model(engine.model)
    assert store.occupied == 0
    assert populate[0].held_bytes == store.arena_bytes, "what slices have touched stays"


def test_it_is_ahead_by_what_steps_take(store, populate, tmp_path, monkeypatch):
    """A prompt may take much; tokens that take a slot each share their cores with no more than what comes next."""
    path = tmp_path / "towers"
    path.touch()
    os.truncate(path, 400 * SLICE_BYTES)
    monkeypatch.setattr(populating, "AHEAD_BYTES", 200 * MIB)
    engine = Engine(store, sources(str(path), 1, 1, 400, slice_bytes=SLICE_BYTES))
    populate.append(Populating(store, store.num_slots))

    def step(experts: range) -> int:
        """Bytes beyond the slots in use that are populated then."""
        engine.ask(0, experts)
        finish_reads(store)
        engine.end_step()
        populate[0].end_step()
        populate[0]._catch_up()
        return populate[0]._reached - store.occupied * MIB

    assert step(range(20)) > 196 * MIB
    assert step(range(20, 21)) > 196 * MIB, "steps before it took 20"
    asked = []
    monkeypatch.setattr(populating, "available_bytes", lambda: asked.append(1))
    ahead = [step(range(e, e + 1)) // MIB for e in range(21, 171)]
    stretch = store.taken_bytes(1) // MIB
    assert ahead[:90] == list(range(ahead[0], ahead[0] - 90, -1)), "nobody looks for more while the prompts' last"
    assert all(stretch < left <= stretch + 4 for left in ahead[110:]), "a stretch and a piece, less what a piece does not fill"
    assert len(asked) == sum(now >= before for before, now in itertools.pairwise(ahead)) > 9, "once for each piece of four slots"
    assert step(range(171, 191)) > 156 * MIB


def test_a_small_arena_is_populated_wholly_and_the_thread_ends(populate):
    store = SlotStore(5, SLICE_BYTES)
    populate.append(Populating(store, store.num_slots))
    populate[0]._thread.join(60)
    assert not populate[0]._thread.is_alive()
    assert populate[0].over
    assert resident_bytes(store) == store.arena_bytes


def test_slots_that_no_slice_will_fill_get_no_memory(store, populate, monkeypatch):
    monkeypatch.setattr(populating, "AHEAD_BYTES", 1 << 40)
    populate.append(Populating(store, 20))
    populate[0].end_step()
    assert populate[0].over
    populate[0]._thread.join(60)
    assert not populate[0]._thread.is_alive()
    assert store.taken_bytes(20) <= resident_bytes(store) <= store.taken_bytes(20) + LARGE_PAGE < store.arena_bytes


def test_an_arena_that_does_not_fit_is_left_to_its_slices(store, populate, monkeypatch):
    monkeypatch.setattr(populating, "available_bytes", lambda: store.arena_bytes - 1)
    populate.append(Populating(store, store.num_slots))
    populate[0].end_step()
    assert populate[0].over
    assert resident_bytes(store) == 0


def test_it_stops_before_memory_is_short(store, populate, monkeypatch):
    answers = iter([store.arena_bytes, populating.SPARED_BYTES + 4 * MIB])  # the whole arena, then one piece more
    monkeypatch.setattr(populating, "available_bytes", lambda: next(answers, populating.SPARED_BYTES + 4 * MIB - 1))
    populate.append(Populating(store, store.num_slots))
    populate[0].end_step()
    populate[0].close()
    assert 4 * MIB <= resident_bytes(store) <= 4 * MIB + LARGE_PAGE


def test_where_the_system_does_not_say_it_populates(populate, monkeypatch):
    monkeypatch.setattr(populating, "available_bytes", lambda: None)
    store = SlotStore(5, SLICE_BYTES)
    populate.append(Populating(store, store.num_slots))
    populate[0]._thread.join(60)
    assert resident_bytes(store) == store.arena_bytes


def test_without_a_thread_reads_bring_their_pages(store, monkeypatch):
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    begun = Populating(store, store.num_slots)
    begun.end_step()
    begun.close()
    assert begun.over
    assert resident_bytes(store) == 0


@pytest.fixture
def _a_process_of_its_own() -> Iterator[None]:
    reset_documents()
    yield
    streaming.forget_store()
    reset_documents()


@pytest.mark.usefixtures("_a_process_of_its_own")
def test_two_engines_share_the_populating_of_their_arena(tiny_model):
    path = tiny_model("qwen2moe-s15-z0-mix")
    with vllm_cpp.load(path, expert_stream=48, threads=1) as one, vllm_cpp.load(path, threads=1) as other:
        before = one.generate([1, 2, 3], max_tokens=2, temperature=0).token_ids
        assert other.generate([1, 2, 3], max_tokens=2, temperature=0).token_ids == before
        assert streaming._process.populating.over
        assert resident(streaming._process.store).all()
    streaming.forget_store()
    assert not [thread for thread in threading.enumerate() if thread.name == "vllm-populate"]


@pytest.mark.usefixtures("_a_process_of_its_own")
def test_memory_that_was_populated_is_not_missed_again(tiny_model, monkeypatch, capfd):
    """Another engine finds less memory available by what the arena got ahead of its slices."""
    path = tiny_model("qwen2moe-s15-z0-mix")
    with vllm_cpp.load(path, expert_stream=100, threads=1) as one:
        one.generate([1, 2, 3], max_tokens=1, temperature=0)
        process = streaming._process
        assert process.populating.held_bytes == process.store.arena_bytes > process.store.occupied * process.store.cell_bytes
        monkeypatch.setattr(streaming, "available_bytes", lambda: 0)
        with vllm_cpp.load(path, threads=1):
            pass
    assert "lower expert_stream.slots" not in capfd.readouterr().err


@pytest.mark.usefixtures("_a_process_of_its_own")
def test_a_load_that_fails_leaves_nobody_populating(tiny_model, monkeypatch):
    class NoLanes:
        def __init__(self, *_: object) -> None:
            raise ModelLoadError("no thread for a lane")

    monkeypatch.setattr(streaming, "Lanes", NoLanes)
    monkeypatch.setattr(populating, "AHEAD_BYTES", 1 << 40)
    with pytest.raises(ModelLoadError, match="no thread for a lane"):
        vllm_cpp.load(tiny_model("qwen2moe-s15-z0-mix"), expert_stream=100_000, threads=1)
    assert not [thread for thread in threading.enumerate() if thread.name == "vllm-populate"]


def test_touching_pages_leaves_what_lanes_read_into_them(tmp_path: Path):
    path = tmp_path / "towers"
    content = np.random.default_rng(5).integers(0, 4, (60, 16384), np.uint8)
    content.reshape(60, -1, 4096)[::2, :, :8] = 0  # words that a touch writes again
    path.write_bytes(content.tobytes())
    for direct in (False, True):
        store = SlotStore(60, 16384)
        lanes, over = Lanes(store, 3), threading.Event()

        def touch(store: SlotStore = store, over: threading.Event = over) -> None:
            while not over.is_set():
                reads.touch_pages(store.arena_address, store.arena_bytes)

        toucher = threading.Thread(target=touch)
        toucher.start()
        engine = Engine(store, sources(str(path), 1, 1, 60, slice_bytes=16384), direct=direct)
        try:
            for _ in range(20):
                engine.ask(0, range(60))
                engine.end_step()
                for e in range(60):
                    address, _ = engine.place(0, 0, e)
                    assert ctypes.string_at(address, 16384) == content[e].tobytes()
                store.close_model(engine.model)
                engine = Engine(store, sources(str(path), 1, 1, 60, slice_bytes=16384), direct=direct)
        finally:
            over.set()
            toucher.join()
            lanes.close()


ENDING = """
import os, sys
from vllm_cpp.residency import populating
from vllm_cpp.residency.slots import SlotStore
populating.AHEAD_BYTES = 1 << 40
populating.SPARED_BYTES = 0
store = SlotStore(2000, 1 << 20)
begun = populating.Populating(store, 2000)
{then}
"""


@pytest.mark.parametrize(
    "then",
    [
        "assert begun._thread.is_alive()",
        "os._exit(0)",
        "begun.close(); assert not begun._thread.is_alive() and begun._reached < store.arena_bytes",
        "child = os.fork()\nif child == 0:\n    begun.close()\n    os._exit(0)\nassert os.waitpid(child, 0)[1] == 0; begun.close()",
    ],
    ids=["python ends", "the process ends", "closed", "forked"],
)
def test_it_may_be_under_way_when_things_end(then):
    ran = subprocess.run([sys.executable, "-c", ENDING.format(then=then)], capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
