"""The benchmarks' bookkeeping: turns are taken, medians compared, peers' answers read, reports kept and drawn, synthetic models run."""

from __future__ import annotations

import xml.dom.minidom
from pathlib import Path

import numpy as np
import pytest

import vllm_cpp
from benchmarks import decode, kernels, make_synthetic, peers, plot, results
from benchmarks.results import Case, Report, Result
from tiny_models import build
from vllm_cpp.gguf_file import open_model

PP, TG, DEEP, MANY = Case("pp", 512), Case("tg", 128), Case("tg", 128, 1024), Case("tg", 128, 0, 4)


def fake_peer(folder: Path, script: str, name: str = "llama-bench") -> Path:
    peer = folder / name
    peer.write_text(f"#!/bin/sh\n{script}\n")
    peer.chmod(0o755)
    return peer


def report() -> Report:
    ours = [("ours", 1, PP, rate) for rate in (100, 120, 900)] + [("ours", 1, TG, rate) for rate in (30, 33, 31)]
    theirs = [("theirs", 1, PP, rate) for rate in (60, 10, 80)] + [("theirs", 1, TG, rate) for rate in (20, 62, 15)]
    rows = [Result(name, threads, test, float(rate)) for name, threads, test, rate in [*ours, ("ours", 1, MANY, 90), *theirs]]
    return Report("m.gguf", {"date": "today", "machine": "a <box>"}, rows, {1: [9.0, 10.0, 11.0]}, {0: 200_000_000})


def test_contenders_take_turns_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PAUSE_S", 0.0)
    calls = []

    def contender(name: str) -> object:
        def run(threads: int, number: int) -> list[Result]:
            calls.append((number, threads, name))
            return [Result(name, threads, PP, 1.0), Result(name, threads, TG, 1.0)]

        return run

    found = decode.rounds([contender("a"), contender("b")], [1, 2], 2)
    assert calls == [(n, t, c) for n in (0, 1) for t in (1, 2) for c in "ab"]
    assert len(found) == 16


def test_one_sequence_is_measured_at_every_context_and_several_at_theirs() -> None:
    assert decode.plan(512, 128, [0, 1024], [1, 4], [0]) == [PP, TG, Case("pp", 512, 1024), DEEP, MANY]
    assert decode.plan(0, 128, [0], [1], [0]) == [TG]
    assert [str(test) for test in (PP, DEEP, MANY)] == ["pp512", "tg128 @ 1024", "tg128 x 4"]


def test_the_table_compares_medians_and_says_what_memory_could_do() -> None:
    assert report().markdown().splitlines() == [
        "| test | threads | ours, tok/s | theirs, tok/s | ratio | of read bandwidth |",
        "|---|---|---|---|---|---|",
        "| pp512 | 1 | 120.0 (100.0 to 900.0) | 60.0 (10.0 to 80.0) | **2.00** |  |",
        "| tg128 | 1 | 31.0 (30.0 to 33.0) | 20.0 (15.0 to 62.0) | **1.55** | 62 % |",
        "| tg128 x 4 | 1 | 90.0 (90.0 to 90.0) |  |  |  |",
        "",
        "Memory read in the same rounds: 10.0 GB/s on 1 thread.",
    ]


def test_a_report_comes_back_from_its_file_and_is_drawn(tmp_path: Path) -> None:
    report().save(tmp_path / "report.json")
    assert results.load(tmp_path / "report.json") == report()
    drawing = plot.svg([report(), report()])
    xml.dom.minidom.parseString(drawing)
    assert drawing.count("pp512, 1 thread<") == drawing.count(">2.00<") == drawing.count("today, a &lt;box&gt;") == 2
    assert "tg128 x 4" not in drawing  # there is nothing to compare it with


def test_a_peers_answer_is_read(tmp_path: Path) -> None:
    rows = (
        '[{"build_commit":"abc","n_prompt":512,"n_gen":0,"n_depth":0,"avg_ts":5.5},{"build_commit":"abc","n_prompt":0,"n_gen":128,"avg_ts":2.5},'
        '{"build_commit":"abc","n_prompt":0,"n_gen":128,"n_depth":1024,"avg_ts":2.0},'
        '{"build_commit":"abc","n_prompt":512,"n_gen":0,"n_depth":1024,"avg_ts":1.5}]'
    )
    peer = fake_peer(tmp_path, f"echo \"$@\" >{tmp_path}/said; echo '{rows}'")
    fake_peer(tmp_path, 'echo main: n_kv_max; echo \'{"pl": 4, "speed_tg": 9.5}\'', "llama-batched-bench")
    found = list(decode.measure_peer(peer, Path("model.gguf"), 2, [PP, TG, DEEP, MANY]))
    name = "llama.cpp abc"
    assert found == [Result(name, 2, PP, 5.5), Result(name, 2, TG, 2.5), Result(name, 2, DEEP, 2.0), Result(name, 2, MANY, 9.5)]
    assert (tmp_path / "said").read_text() == "-m model.gguf -t 2 -p 512 -n 128 -d 0,1024 -r 1 -o json\n"


def test_a_peer_that_fails_is_named_and_one_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    peer = fake_peer(tmp_path, "echo no such model >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"llama-bench -m model\.gguf .* failed: no such model"):
        list(decode.measure_peer(peer, Path("model.gguf"), 1, [PP]))
    assert list(peers.llama_batched_bench(peer, Path("model.gguf"), 1, [MANY], "b")) == []


def test_every_test_is_run_on_a_real_engine(tmp_path: Path) -> None:
    model = build("qwen3moe", size=0, dtype="F32").write(tmp_path / "tiny.gguf")
    tests = [Case("pp", 40), Case("tg", 4), Case("pp", 40, 64), Case("tg", 4, 64), Case("tg", 4, 64, 3)]
    found = list(decode.measure(model, 1, tests, 0))
    assert [result.test for result in found] == tests
    assert all(result.rate > 0 for result in found)


def test_bytes_of_a_token_are_its_experts_share_and_the_rest(tmp_path: Path) -> None:
    model = build("qwen3moe", size=0, dtype="F32").write(tmp_path / "tiny.gguf")
    with open_model(model) as opened:
        sizes = {name: info.n_bytes for name, info in opened.tensors.items()}
        experts, top_k = (opened.get_u32(f"qwen3moe.{key}") for key in ("expert_count", "expert_used_count"))
        heads, length = (opened.get_u32(f"qwen3moe.attention.{key}") for key in ("head_count_kv", "key_length"))
        layers = opened.get_u32("qwen3moe.block_count")
    towers = sum(size for name, size in sizes.items() if "_exps" in name)
    rest = sum(sizes.values()) - towers - sizes["token_embd.weight"]
    assert decode.token_bytes(model, 0) == rest + towers * top_k // experts
    assert decode.token_bytes(model, 10) - decode.token_bytes(model, 0) == 10 * layers * heads * length * 2 * 2


@pytest.mark.parametrize(("architecture", "encodings"), [("qwen3moe", {"Q4_K", "Q6_K"}), ("deepseek2", {"Q4_K", "Q6_K", "Q5_0"})])
def test_a_synthetic_model_runs(tmp_path: Path, architecture: str, encodings: set[str]) -> None:
    path = tmp_path / "q4_k.gguf"
    make_synthetic.make("Q4_K", path, make_synthetic.Shape(layers=2, experts=8), architecture)
    rows = []
    with vllm_cpp.load(path, threads=1) as llm:
        llm.generate([5, 300, 31999], max_tokens=2, temperature=0, ignore_eos=True, logits_processor=lambda _, row: rows.append(row.copy()))
    assert all(np.isfinite(row).all() and row.std() > 0.1 for row in rows)
    with open_model(path) as model:
        assert {info.encoding.name for info in model.tensors.values()} == {"F32"} | encodings


@pytest.mark.parametrize("architecture", make_synthetic.ARCHITECTURES)
@pytest.mark.parametrize("encoding", ["Q4_K", "Q8_0", "F16"])
def test_a_synthetic_model_is_as_large_as_asked(encoding: str, architecture: str) -> None:
    shape = make_synthetic.shape_for(encoding, 2_000_000_000, architecture)
    assert shape.layers >= 3
    assert 1.6e9 < sum(plan.n_bytes for plan in make_synthetic.tensors(encoding, shape, architecture)) < 2.4e9


def test_a_synthetic_model_has_as_many_experts_as_asked() -> None:
    shape = make_synthetic.shape_for("Q4_K", 8_500_000_000, "qwen35moe", 512)
    assert shape.experts == 512
    assert 8e9 < sum(plan.n_bytes for plan in make_synthetic.tensors("Q4_K", shape, "qwen35moe")) < 9e9


def test_kernels_are_measured_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ROWS_BYTES", 1 << 20)
    assert set(kernels.measure_rows("Q8_0", 256, None, 1)) == {"read", "ours"}
    assert kernels.measure_tile("Q8_0", 256, 4, None, 1)["ours"] > 0
    rows = [{"encoding": "Q8_0", "rows": {"ours": 7.0, "read": 10.0, "ggml": 5.0}, "tiles": {4: {"ours": 50.0}}}]
    assert kernels.table(rows, [4]).splitlines()[2] == "| Q8_0 | 7.0 | 0.70 | **1.40** | 50 |  |"
