"""The README's examples run as they stand, against the demo's model and the library installed beside this Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import fetch_smollm2

README = Path(__file__).parent.parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader would stand: the model is here, and the C example is in hello.c."""
    (tmp_path / "model.gguf").symlink_to(fetch_smollm2.moe())
    (tmp_path / "hello.c").write_text(next(text for language, text in BLOCKS if language == "c"))
    return tmp_path


def run(folder: Path, command: list[str]) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "sh"])
def test_shell_examples(folder: Path, text: str) -> None:
    assert "Paris" in run(folder, ["bash", "-eu", "-o", "pipefail", "-c", text])


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "python"])
def test_python_examples(folder: Path, text: str) -> None:
    assert "Paris" in run(folder, [sys.executable, "-c", text])


def test_there_is_an_example_for_each_door() -> None:
    assert {language for language, _ in BLOCKS} == {"c", "python", "sh"}
