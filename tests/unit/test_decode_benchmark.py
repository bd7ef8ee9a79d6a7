"""The benchmark's bookkeeping: turns are taken, medians compared, a peer's JSON read."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import decode
from benchmarks.decode import Rates


def fake_peer(folder: Path, script: str) -> Path:
    peer = folder / "llama-bench"
    peer.write_text(f"#!/bin/sh\n{script}\n")
    peer.chmod(0o755)
    return peer


def test_contenders_take_turns_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PAUSE_S", 0.0)
    calls = []

    def contender(name: str) -> object:
        return lambda threads, number: calls.append((number, threads, name)) or Rates(name, threads, 1.0, 1.0)

    results = decode.rounds([contender("a"), contender("b")], [1, 2], 2)
    assert calls == [(n, t, c) for n in (0, 1) for t in (1, 2) for c in "ab"]
    assert len(results) == 8


def test_the_table_compares_medians() -> None:
    ours = [Rates("ours", 1, prefill, decode) for prefill, decode in ((100, 30), (120, 33), (900, 31))]
    theirs = [Rates("theirs", 1, prefill, decode) for prefill, decode in ((60, 20), (10, 62), (80, 15))]
    assert decode.table(ours + theirs, 512, 128).splitlines() == [
        "| test | threads | ours, tok/s | theirs, tok/s | ratio |",
        "|---|---|---|---|---|",
        "| pp512 | 1 | 120.0 (100.0 to 900.0) | 60.0 (10.0 to 80.0) | **2.00** |",
        "| tg128 | 1 | 31.0 (30.0 to 33.0) | 20.0 (15.0 to 62.0) | **1.55** |",
    ]


def test_a_peers_answer_is_read(tmp_path: Path) -> None:
    rows = '[{"build_commit":"abc","n_prompt":8,"n_gen":0,"avg_ts":5.5},{"build_commit":"abc","n_prompt":0,"n_gen":4,"avg_ts":2.5}]'
    peer = fake_peer(tmp_path, f"echo '{rows}'")
    assert decode.measure_peer(peer, Path("model.gguf"), 2, 8, 4) == Rates("llama.cpp abc", 2, 5.5, 2.5)


def test_a_peer_that_fails_is_named(tmp_path: Path) -> None:
    peer = fake_peer(tmp_path, "echo no such model >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"llama-bench -m model\.gguf .* failed: no such model"):
        decode.measure_peer(peer, Path("model.gguf"), 1, 8, 4)
