"""Expert streaming seen from a C host: the statistics' last line is printed exactly once, however the process ends properly."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from clibrary import PROGRAMS, Installation

Build = Callable[[str], Path]
LINE = re.compile(
    r"^\[expert-stream\] steps=(\d+) hits=\d+ misses=(\d+) evictions=\d+ fills=(\d+) bytes=\d+ exhausted=0 advised=0$", re.MULTILINE
)  # fmt: skip


@pytest.fixture(scope="module")
def experts(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama_moe-s6-z0-mix")


def last_lines(installed: Installation, *command: object) -> list[tuple[str, str, str]]:
    stream = {"VT_MOE_EXPERT_STREAM": "1", "VT_MOE_EXPERT_STREAM_STATS_EVERY": "0"}
    done = installed.run(*command, env={**installed.environment, **stream})
    assert done.stderr.count("[expert-stream] ON slots=64 ") == 1, done.stderr
    return LINE.findall(done.stderr)


@pytest.mark.parametrize("mode", ["return", "exit", "busy", "in-flight", "stream-callback", "other-thread", "atexit"])
def test_a_c_host_that_ends_prints_one_line(installed: Installation, program: Build, experts: Path, mode: str) -> None:
    [(steps, misses, fills)] = last_lines(installed, program("exits"), mode, experts)
    assert misses == fills
    if mode in ("return", "exit"):
        assert steps == "0"
    elif mode != "in-flight":  # its first step may not have begun
        assert int(steps) > 0


def test_a_c_host_that_is_cut_off_prints_none(installed: Installation, program: Build, experts: Path) -> None:
    assert last_lines(installed, program("exits"), "_exit", experts) == []


def test_a_python_host_of_the_c_library_prints_one_line(installed: Installation, experts: Path) -> None:
    lines = last_lines(installed, installed.python, PROGRAMS / "host.py", installed.lib / "libvllm.so", experts)
    assert len(lines) == 1


def test_without_a_store_there_is_no_line(installed: Installation, program: Build, model: Path) -> None:
    done = installed.run(program("exits"), "return", model, env={**installed.environment, "VT_MOE_EXPERT_STREAM": "1"})
    assert "steps=" not in done.stderr
