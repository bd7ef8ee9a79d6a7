"""The policy benchmark on routing made here: its reading of traces, its optimum, and that the default policy earns its place."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import policy

LAYERS, EXPERTS, TOP_K = 8, 24, 3


def write_trace(path: Path, tokens: int = 60, seed: int = 0) -> Path:
    """Routing as real models have it: every layer has favourites, some of a token's experts are the last token's, and topics change."""
    rng = random.Random(seed)
    lines = ["# made by a test", "turn,phase,step,layer,slot,expert"]
    favourites = {il: rng.sample(range(EXPERTS), 8) for il in range(LAYERS)}
    last = {il: favourites[il][:TOP_K] for il in range(LAYERS)}
    for number in range(tokens):
        decode = number >= tokens // 4
        for il in range(LAYERS):
            if rng.random() < 0.02:
                favourites[il] = rng.sample(range(EXPERTS), 8)
            chosen = [e for e in last[il] if rng.random() < 0.1]
            while len(chosen) < TOP_K:
                e = rng.choice(favourites[il]) if rng.random() < 0.8 else rng.randrange(EXPERTS)
                chosen += [e] if e not in chosen else []
            last[il] = chosen
            lines += [f"0,{int(decode)},{number},{il + 1},{slot},{e}" for slot, e in enumerate(chosen)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_is_read_by_its_columns(tmp_path: Path) -> None:
    trace = policy.read_trace(write_trace(tmp_path / "made.csv", tokens=8))
    assert (trace.name, trace.num_layers, trace.num_experts, trace.cycle) == ("made", LAYERS, EXPERTS, LAYERS * TOP_K)
    prompt = [step for step in trace.steps if not step.decode]
    assert [step.layer for step in prompt] == list(range(LAYERS))  # one visit a layer
    assert all(step.tokens == 2 and sum(step.chosen.values()) == 2 * TOP_K for step in prompt)
    assert [step.layer for step in trace.steps if step.decode] == 6 * list(range(LAYERS))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv: expected a CSV file with the columns phase, step, layer, expert"):
        policy.read_trace(tmp_path / "other.csv")


def test_the_optimum_is_the_optimum(tmp_path: Path) -> None:
    """On a trace of three experts in turn and room for two, Belady keeps one of the two that come next: every other visit hits."""
    lines = ["phase,step,layer,expert"] + [f"1,{i},0,{i % 3}" for i in range(2, 302)]
    (tmp_path / "turns.csv").write_text("\n".join(lines))
    trace = policy.read_trace(tmp_path / "turns.csv")
    assert policy.belady(trace, 2 * policy.TOWERS) == pytest.approx(0.5, abs=0.01)
    assert policy.replay(trace, 2 * policy.TOWERS, "lru") == 0.0
    assert policy.belady(trace, 3 * policy.TOWERS) == policy.replay(trace, 3 * policy.TOWERS, "lru") == 297 / 300


def test_the_default_policy_is_never_worse_than_the_others_nor_better_than_the_optimum(tmp_path: Path) -> None:
    trace = policy.read_trace(write_trace(tmp_path / "made.csv"))
    rows = policy.measure(trace, ["lru", "decay", "next"])
    assert policy.below(trace, rows) == []
    for row in rows:
        assert row["decay"] - policy.LOSS_ALLOWED <= row["next"] <= row["belady"], row
    assert all(small["next"] < large["next"] for small, large in pairwise(rows))
    worse = [{**row, "next": row["lru"] - 1} for row in rows]
    assert len(policy.below(trace, worse)) == len(rows)
    assert policy.table(trace, rows).count("\n| x") == len(policy.POOLS)


def test_hit_rates_by_share_are_those_of_that_many_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = policy.read_trace(write_trace(tmp_path / "made.csv"))
    monkeypatch.setattr(policy, "SHARES", (0.25, 0.5))
    total = LAYERS * EXPERTS * policy.TOWERS
    assert policy.by_share(trace) == [(s, round(100 * policy.replay(trace, int(s * total), "next"), 1)) for s in (0.25, 0.5)]
    assert policy.by_share(trace)[0] < policy.by_share(trace)[1]
