"""The streaming benchmark: what its arms are, that they run, and what its table says."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import larger_than_memory, streaming, streaming_report


@pytest.fixture
def control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like version 2's tree of control groups."""
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    monkeypatch.setattr(streaming, "ROOT", tmp_path)
    monkeypatch.setattr(streaming.time, "sleep", lambda _: None)
    return tmp_path


def test_a_limited_command_joins_a_group_with_the_limit(control_groups: Path) -> None:
    folder = control_groups / f"vllm-streaming-{streaming.os.getpid()}"
    script = f"import pathlib; print(pathlib.Path({str(folder)!r}, 'cgroup.procs').read_text(), __import__('os').getpid())"
    output, peak = streaming.run_limited([sys.executable, "-c", script], {}, 12345)
    joined, ran = output.split()
    assert joined == ran
    assert (folder / "memory.max").read_text() == "12345"
    assert peak is None  # the kernel would say
    (folder / "memory.peak").write_text("77\n")
    assert streaming.peak_of(folder) == 77
    with pytest.raises(RuntimeError, match="ended with 3"):
        streaming.run_limited([sys.executable, "-c", "raise SystemExit(3)"], {}, None)


def test_the_arms_run_and_are_compared(tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(streaming, "PAUSE_S", 0)
    monkeypatch.setattr(streaming, "RATE_S", 0.05)
    path = tiny_model("qwen2moe-s15-z0-mix")
    report = tmp_path / "report.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["streaming", str(path), "--slots", "10,48", "--threads", "1", "--prompt", "4", "--generate", "5", "--json", str(report)],
    )
    streaming.main()
    printed = capsys.readouterr().out
    arms = json.loads(report.read_text())["arms"]
    assert list(arms) == ["streamed, 10 slots", "streamed, 48 slots", streaming.RESIDENT, "borrowed"]
    few, all_there = arms["streamed, 10 slots"][0], arms["streamed, 48 slots"][0]
    assert few["expert_stream"]["misses"] > all_there["expert_stream"]["misses"] == all_there["expert_stream"]["fills"] > 0
    assert few["token_bytes"] > all_there["token_bytes"]
    assert few["drive_rate"] > 0
    assert few["decode_hits"] < all_there["decode_hits"] < 1
    assert few["budget"] < all_there["budget"] < few["budget"] + (1 << 22)
    assert all(rows[0]["decode"] > 0 and rows[0]["prefill"] > 0 for rows in arms.values())
    for name in arms:
        assert f"| {name} | " in printed


def test_a_model_that_fits_is_warm_and_has_a_slot_for_every_slice(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(streaming, "PAUSE_S", 0)
    path = tiny_model("qwen2moe-s15-z0-mix")
    args = streaming.parser().parse_args(
        [str(path), "--fits", "--prompt", "30", "--generate", "3", "--warm", "70", "--prompts", "3", "--threads", "1"]
    )
    found = streaming.compare(args)
    total = streaming.slice_count(path)
    assert list(found) == [f"streamed, {total} slots", "borrowed"]
    streamed = found[f"streamed, {total} slots"][0]
    assert streamed["expert_stream"]["evictions"] == 0
    assert streamed["decode_hits"] > 0.9
    assert found["borrowed"][0]["budget"] is None
    for row in (streamed, found["borrowed"][0]):
        assert len(row["prefills"]) == 4
        assert row["prefills"][-1] == row["prefill"]
        assert min(row["prefills"]) > 0


def test_a_text_goes_on(tiny_model) -> None:
    figures = streaming.generate_here(tiny_model("qwen2moe-s15-z0-mix"), 1, 6, 0)
    assert figures["decode"] > 0
    assert figures["expert_stream"] is None


def test_medians_ratios_and_bounds() -> None:
    def row(decode: float, **more: object) -> dict[str, object]:
        return {"decode": decode, "prefill": 8.0, "second_half": decode, "load_s": 1.0, "peak": 10**9, **more}

    counted = {"decode_hits": 0.75, "token_bytes": 1e7, "drive_rate": 1e9, "missing_rate": 9e8, "budget": 2 * 10**9}
    arms = {"streamed": [row(rate, **counted) for rate in (40, 60, 80)], "llama.cpp mmap": [{"decode": 0.5}]}
    streamed, peer = streaming.table(arms).splitlines()[2:]
    figures = "60.00 | 8.0 | 1.0 | 75.0 % | 100.0 (1.00 GB/s)"
    assert streamed == f"| streamed | 60.00 (40.00 to 80.00) | 120.0 | {figures} | 60 % | 90 % | 1.00 (50 % of the budget) |"
    assert peer == "| llama.cpp mmap | 0.50 (0.50 to 0.50) | 1.0 |  |  |  |  |  |  |  |  |"
    resident = {streaming.RESIDENT: [row(80), row(80), row(80)]}
    assert " | 75 % | 90 % | " in streaming.table({**arms, **resident}), "the lesser of the two bounds counts"


def test_the_peer_is_asked_for_a_few_tokens_only(tmp_path: Path) -> None:
    args = argparse.Namespace(
        model=Path("m.gguf"), slots=[5], threads=2, prompt=7, generate=500, warm=0, prompts=0, text=False, fits=False, only=None,
        peer=tmp_path / "llama-bench",
    )  # fmt: skip
    found = streaming.arms(args)
    command, environment = found["llama.cpp mmap"]
    assert command[command.index("-n") + 1] == str(streaming.PEER_TOKENS)
    assert environment["LD_LIBRARY_PATH"].startswith(str(tmp_path))
    assert found["streamed, 5 slots"][1]["VT_MOE_EXPERT_STREAM_SLOTS"] == "5"
    args.only = "llama"
    assert list(streaming.arms(args)) == ["llama.cpp mmap"]


def test_the_worked_example_answers_twice_and_fills_its_columns(tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "example.md"
    monkeypatch.setattr(larger_than_memory, "model_file", lambda *_: tiny_model("qwen2moe-s15-z0-mix"))
    monkeypatch.setattr(sys, "argv", ["larger_than_memory", "--tokens", "4", "--context", "256", "--out", str(out)])
    larger_than_memory.main()
    text = out.read_text()
    assert text.count("\nslots  ") == text.count("\n[expert-stream] ON slots=") == text.count("\n[expert-stream] steps=8 ") == 1
    rows = {cells[1].strip(): cells[2:4] for line in text.splitlines() if len(cells := line.split("|")) == 5}
    assert list(rows)[2:] == [label for label, *_ in larger_than_memory.ROWS]
    assert [cell.strip() for cell in rows[""]] == ["streamed", "borrowed"]
    assert all(float(cell) > 0 for name, cells in rows.items() if name.startswith("tok/s") for cell in cells)
    assert rows["hits, second answer"][0].endswith(" % ")
    assert rows["hits, second answer"][1] == "  "


def test_the_report_measures_all_there_is_to_say(tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tiny_model("qwen2moe-s15-z0-mix"), tmp_path / "report.md"
    monkeypatch.setattr(streaming, "PAUSE_S", 0)
    monkeypatch.setattr(streaming, "RATE_S", 0.05)
    monkeypatch.setattr(streaming_report, "model_file", lambda *_: path)
    monkeypatch.setattr(streaming_report, "LIMIT", 1e5)  # no tighter than the machine
    monkeypatch.setattr(streaming_report, "FITS", ["--fits", "--prompt", "30", "--generate", "3", "--warm", "70", "--prompts", "2"])
    monkeypatch.setattr(streaming_report, "STEPS", 10)
    monkeypatch.setattr(streaming_report, "CYCLES", 2)
    monkeypatch.setattr(streaming_report, "WARM_CYCLES", 1)
    real, limits = streaming.run_limited, []

    def unlimited(command: list[str], environment: dict[str, str], limit: int | None) -> tuple[str, int | None]:
        limits.append(limit)
        return real(command, environment, None)

    monkeypatch.setattr(streaming, "run_limited", unlimited)
    monkeypatch.setattr(sys, "argv", ["streaming_report", "--rounds", "1", "--experts", "4", "--out", str(out)])
    streaming_report.main()
    text = out.read_text()
    assert text.count(" | ".join(streaming.HEADS)) == 2
    assert text.count("| streamed, ") == text.count("| borrowed | ") == 2
    assert "Streamed over borrowed, round by round: decode " in text
    assert re.search(r"stands in the table: streamed (\d+, ){2}\d+ tok/s, borrowed (\d+, ){2}\d+\.", text)
    assert re.search(r"10 decoded tokens after as many others took -?\d+ KiB more, and 2 engines", text)
    assert limits.count(int(1e5 * path.stat().st_size)) == 4  # two plans and two arms
