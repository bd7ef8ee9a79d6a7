"""docs/expert-streaming.md: its commands run, its documents are read, and the lines it shows are the ones that are printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_cpp
from vllm_cpp import env
from vllm_cpp.config import offload
from vllm_cpp.config.offload.document import OffloadDocument
from vllm_cpp.config.offload.keys import KEYS
from vllm_cpp.residency import statistics, streaming

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "expert-streaming.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
SHOWN = [line for language, text in BLOCKS if not language for line in text.splitlines()]


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would stand: the model is here, and vllm-cli is this library's."""
    here = tmp_path_factory.mktemp("page")
    (here / "model.gguf").symlink_to(tiny_model("qwen2moe-s15-z0-mix"))
    (here / "vllm-cli").write_text(f'#!/bin/sh\nexec {sys.executable} -m vllm_cpp.cli "$@"\n')
    (here / "vllm-cli").chmod(0o755)
    return here


def run(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in set(env.ROWS) - {"VLLM_CPP_CACHE_DIR", "HOME"}}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(Path(vllm_cpp.__file__).parents[1])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def shape(line: str) -> str:
    """A line without its figures."""
    return re.sub(r"\d+(\.\d+)?", "0", line)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs_and_prints_the_lines_of_the_page(folder: Path, command: str) -> None:
    done = run(folder, ["bash", "-eu", "-c", command])
    if "--plan" in command:
        return
    streamed = [shape(line) for line in done.stderr.splitlines() if line.startswith("[expert-stream]")]
    shown = [shape(line) for line in SHOWN if line.startswith("[expert-stream]")]
    assert {streamed[0], streamed[-1]} <= set(shown), done.stderr
    if "--json" in command:
        assert json.loads(done.stdout)["expert_stream"]["slots"] == 4000


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "python"])
def test_every_python_example_runs(folder: Path, text: str) -> None:
    assert "'slots': 4000" in run(folder, [sys.executable, "-c", text]).stdout


def test_the_plan_shown_is_one(folder: Path) -> None:
    printed = run(folder, ["vllm-cli", "--model", "model.gguf", "--plan"]).stdout.partition("\n\n")[0]
    shown = [line for line in SHOWN if re.match(r"\S+(?: \S+)? {2,}\S", line)]
    assert [line[:13] for line in shown] == [line[:13] for line in printed.splitlines()]


def test_the_documents_are_read_and_the_keys_and_variables_are_real() -> None:
    documents = [text for language, text in BLOCKS if language == "json"] + re.findall(r"`(\{\".*?\})`", PAGE)
    assert len(documents) > 1
    for document in documents:
        assert offload.parse(document) != OffloadDocument()
    keys = {key.path for key in KEYS}
    rows = re.findall(r"^\| `(VT_\w+)` \| (?:`([\w.]+)`)?", PAGE, re.MULTILINE)
    assert {name for name, _ in rows} == {name for name in env.ROWS if name.startswith("VT_MOE_EXPERT_STREAM")}
    assert all(key in keys for _, key in rows if key)


def test_the_fields_of_the_line_are_explained() -> None:
    section = PAGE.partition("\n## Read the line\n")[2].partition("\n## ")[0]
    explained = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)))
    assert sorted(explained) == sorted(statistics.NAMES)


def test_what_the_page_says_is_said_is_said() -> None:
    source = re.sub(r'"\s*\n\s*f?"', "", Path(streaming.__file__).read_text(encoding="utf-8"))
    source = re.sub(r"\{[^{}]*\}", "…", source)
    section = PAGE.partition("\n## When something is said\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)
    assert len(lines) > 8
    for line in lines:
        for part in re.split(r"…(?:: )?|VT_GGUF_KEEP_QUANT=0|: it", line):
            assert part.strip() in source, (line, part)
