"""The compiled slot store against the plain one in `reference/slots.py`, and what the plain one cannot say: places, ages of models, two
engines.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from reference.slots import NaiveStore, NaiveVisit
from residency.driving import SLICE_BYTES, Engine, finish_reads, held, sources
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.kernels.cpu import slots as kernel
from vllm_cpp.residency.slots import MAX_LAYERS, SlotStore

LAYERS, EXPERTS = 5, 12


@pytest.fixture
def towers_file(tmp_path: Path) -> Path:
    path = tmp_path / "towers.bin"
    path.write_bytes(np.random.default_rng(0).bytes(2 * LAYERS * 3 * EXPERTS * SLICE_BYTES))
    return path


def routing(rng: random.Random, favourites: list[int], most: int) -> dict[int, int]:
    """Some experts, each chosen once or more; a few are chosen again and again."""
    pool = favourites if rng.random() < 0.7 else range(EXPERTS)
    return {e: rng.randint(1, 3) for e in rng.sample(list(pool), rng.randint(1, min(most, len(pool))))}


@pytest.mark.parametrize("policy", ["next", "lru", "decay"])
@pytest.mark.parametrize(("num_slots", "towers"), [(1, 3), (2, 3), (3, 3), (7, 3), (17, 3), (31, 2), (64, 3), (180, 3), (200, 3)])
def test_every_decision_is_the_plain_stores(towers_file: Path, policy: str, num_slots: int, towers: int) -> None:
    rng = random.Random(f"{policy} {num_slots}")
    store = SlotStore(num_slots, SLICE_BYTES, policy)
    engine = Engine(store, sources(str(towers_file), LAYERS, towers, EXPERTS))
    plain, visit = NaiveStore(num_slots, policy, {"m": (LAYERS, towers, EXPERTS)}), NaiveVisit()
    favourites = [rng.sample(range(EXPERTS), 4) for _ in range(LAYERS)]
    for step in range(40):
        tokens, seqs = ((1, 1), (1, 1), (24, 1), (6, 3))[step % 4]
        for il in range(LAYERS):
            chosen = routing(rng, favourites[il], 6 if tokens == 1 else EXPERTS)
            plain.visit(visit, "m", il, chosen, tokens, seqs)
            engine.ask(il, chosen, tokens, seqs)
            while True:
                assert engine.visit.wave_experts == visit.wave
                assert held(store, {"m": engine}) == set(plain.held)
                assert engine.visit.again == bool(visit.todo)
                finish_reads(store)
                if not visit.todo:
                    break
                plain.next_wave(visit, "m", il)
                engine.next_wave(il)
    counted = store.counters.as_dict()
    assert {name: counted[name] for name in ("hits", "misses", "evictions", "fills", "exhausted")} == {
        name: plain.counters[name] for name in ("hits", "misses", "evictions", "fills", "exhausted")
    }
    assert counted["fills"] == counted["misses"] - counted["exhausted"]
    assert (counted["exhausted"] > 0) == (num_slots < towers)  # a whole expert fits, so nothing is ever left out


def test_two_engines_share_the_slots_and_never_each_others(towers_file: Path) -> None:
    rng = random.Random(5)
    store = SlotStore(40, SLICE_BYTES, "next")
    half = LAYERS * 3 * EXPERTS * SLICE_BYTES
    engines = {
        "a": Engine(store, sources(str(towers_file), LAYERS, 3, EXPERTS)),
        "b": Engine(store, sources(str(towers_file), LAYERS, 3, EXPERTS, first=half)),
    }
    shape = (LAYERS, 3, EXPERTS)
    plain, visits = NaiveStore(40, "next", {"a": shape, "b": shape}), {"a": NaiveVisit(), "b": NaiveVisit()}
    layers = {name: itertools.cycle(range(LAYERS)) for name in engines}
    for _ in range(300):
        name = rng.choice("aab")
        il, chosen = next(layers[name]), routing(rng, [1, 2, 3, 4], 5)
        plain.visit(visits[name], name, il, chosen, 1, 1)
        engines[name].ask(il, chosen)
        while visits[name].todo:
            finish_reads(store)
            plain.next_wave(visits[name], name, il)
            engines[name].next_wave(il)
        finish_reads(store)
        assert engines[name].visit.wave_experts == visits[name].wave
        assert held(store, engines) == set(plain.held)
        assert store.in_use == sum(slice_.users > 0 for slice_ in plain.held.values())
    assert store.counters.as_dict()["evictions"] == plain.counters["evictions"] > 0


def test_what_one_engine_uses_is_never_evicted_by_another(towers_file: Path) -> None:
    store = SlotStore(9, SLICE_BYTES, "lru")
    half = LAYERS * 3 * EXPERTS * SLICE_BYTES
    first = Engine(store, sources(str(towers_file), LAYERS, 3, EXPERTS))
    second = Engine(store, sources(str(towers_file), LAYERS, 3, EXPERTS, first=half))
    first.ask(0, [3, 4])
    finish_reads(store)
    kept = [first.place(0, t, e) for t in range(3) for e in (3, 4)]
    for il in range(LAYERS):
        second.ask(il, [5])
        finish_reads(store)
    assert [first.place(0, t, e) for t in range(3) for e in (3, 4)] == kept
    assert all(first.slot_of(0, t, e) >= 0 for t in range(3) for e in (3, 4))
    first.end_step()
    assert store.in_use == 3


def test_two_engines_on_one_file_share_its_slices(towers_file: Path) -> None:
    store = SlotStore(30, SLICE_BYTES, "next")
    first, second = (Engine(store, sources(str(towers_file), LAYERS, 3, EXPERTS)) for _ in range(2))
    first.ask(1, [7])
    second.ask(1, [7])  # still being read for the first: the second waits for the same read
    assert finish_reads(store) == 3
    assert [second.place(1, t, 7) for t in range(3)] == [first.place(1, t, 7) for t in range(3)]
    assert store.counters.as_dict() | {"hits": 3, "misses": 3} == store.counters.as_dict()
    first.end_step()
    second.end_step()
    store.close_model(first.model)
    assert store.occupied == 3
    store.close_model(second.model)
    assert store.occupied == 0


def test_a_place_is_aligned_as_the_slice_is_in_its_file(towers_file: Path) -> None:
    store = SlotStore(6, 5000, "next")
    layers = sources(str(towers_file), 1, 3, 4, slice_bytes=5000, first=777)
    engine = Engine(store, layers)
    engine.ask(0, [0, 3])
    places = {(t, e): engine.place(0, t, e)[0] for t in range(3) for e in (0, 3)}
    for (t, e), address in places.items():
        assert address % 4096 == (layers[0][t].offset + 5000 * e) % 4096
    ends = sorted(places.values())
    assert all(b - a >= 5000 for a, b in itertools.pairwise(ends))


def test_a_tower_that_goes_takes_its_slices_along_and_its_name_is_not_its_address(towers_file: Path) -> None:
    store = SlotStore(12, SLICE_BYTES, "next")
    half = LAYERS * 3 * EXPERTS * SLICE_BYTES
    for first in (0, half, 0):
        engine = Engine(store, sources(str(towers_file), LAYERS, 3, EXPERTS, first=first))
        engine.ask(0, [1, 2])
        assert finish_reads(store) == 6  # nothing was there, wherever the new tower's record is in memory
        engine.visit.close()
        store.close_model(engine.model)
        assert store.occupied == store.in_use == 0


def test_layers_of_closed_models_are_used_again(towers_file: Path) -> None:
    store = SlotStore(3, SLICE_BYTES, "next")
    wide = sources(str(towers_file), 1, 1, 1) * (MAX_LAYERS - 1)
    model = store.open_model(wide, direct=False)
    other = store.open_model(sources(str(towers_file), 1, 1, 1, first=64), direct=False)
    with pytest.raises(ModelLoadError, match=f"{MAX_LAYERS} routed layers are open"):
        store.open_model(sources(str(towers_file), 1, 1, 1, first=128), direct=False)
    store.close_model(other)
    store.close_model(model)
    store.close_model(store.open_model(wide, direct=False))


def test_an_idle_models_slices_grow_cold(towers_file: Path) -> None:
    """A model that rests gives its slots up to one that runs, however hot they were."""
    store = SlotStore(6, SLICE_BYTES, "next")
    half = LAYERS * 3 * EXPERTS * SLICE_BYTES
    resting = Engine(store, sources(str(towers_file), 1, 3, EXPERTS))
    running = Engine(store, sources(str(towers_file), 1, 3, EXPERTS, first=half))
    for _ in range(20):
        resting.ask(0, [1])
        finish_reads(store)
    resting.end_step()
    for step in range(200):
        running.ask(0, [2 + step % 4])
        finish_reads(store)
    assert resting.slot_of(0, 0, 1) == -1


def test_a_prompt_leaves_what_decoding_uses(towers_file: Path) -> None:
    """Every expert is read once for a long prompt; those that each token chooses are there afterwards all the same."""
    store = SlotStore(LAYERS * 3 * 4, SLICE_BYTES, "next")
    engine = Engine(store, sources(str(towers_file), LAYERS, 3, EXPERTS))
    favourites = {0: 32, 1: 32, 2: 32}
    rare = dict.fromkeys(range(3, EXPERTS), 1)
    for step in range(3):
        before = store.counters.as_dict()
        for il in range(LAYERS):
            engine.ask(il, favourites | rare if step == 1 else dict.fromkeys(favourites, 1), 105 if step == 1 else 1)
            finish_reads(store)
            while engine.visit.again:
                engine.next_wave(il)
                finish_reads(store)
        after = store.counters.as_dict()
        if step == 1:
            assert after["misses"] - before["misses"] == LAYERS * 3 * (EXPERTS - 3)  # each slice that was not there, once
    assert after["misses"] == before["misses"]


def test_an_arena_that_cannot_be_had_is_refused_with_its_size() -> None:
    with pytest.raises(ModelLoadError, match=r"no memory for 4000000000 slots of 4096 bytes \(15258.79 GiB\).*VT_MOE_EXPERT_STREAM_SLOTS"):
        SlotStore(4_000_000_000, 1)
    assert kernel.POLICIES["next"] == kernel.NEXT
