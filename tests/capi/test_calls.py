"""The calls: each program checks one subject against a real engine, through the installed library, from another directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import embeddings
from clibrary import PROGRAMS, Installation

Build = Callable[[str], Path]


@pytest.mark.parametrize("name", ["values", "absent", "loading", "completing", "processor", "requests", "threads", "forks"])
def test_subject(installed: Installation, program: Build, model: Path, name: str) -> None:
    done = installed.run(program(name), model, cwd="/")
    assert done.returncode == 0, done.stderr


def test_embedding(installed: Installation, program: Build, tmp_path: Path) -> None:
    """The rows are the recorded ones, in the order of the texts."""
    name = "bert-s1-z0-F32"
    recording, path = embeddings.Recording(name), embeddings.model(name).write(tmp_path / f"{name}.gguf")
    done = installed.run(program("embedding"), path, *embeddings.texts())
    assert done.returncode == 0, done.stderr
    *rows, tokens = done.stdout.splitlines()
    values = np.array([[float(number) for number in row.split()] for row in rows])
    assert np.abs(values - recording.values).max() < 1e-3 * np.abs(recording.values).max()
    assert int(tokens) == sum(map(len, recording.ids))


def test_chat(installed: Installation, program: Build, model: Path) -> None:
    done = installed.run(program("chatting"), model)
    assert done.returncode == 0, done.stderr
    answer, *chunks = (json.loads(line) for line in done.stdout.splitlines())
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] <= 6
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == choice["message"]["content"]
    assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + [choice["finish_reason"]]


def test_a_throwing_callback_ends_its_answer_only(installed: Installation, model: Path) -> None:
    """The header forbids it, but a C++ exception passes through the door in good order: the answer is cancelled, the engine serves on."""
    program = installed.compile(PROGRAMS / "throwing.cpp", "throwing", f"-I{PROGRAMS}", compiler="c++", std="-std=c++17")
    done = installed.run(program, model)
    assert done.returncode == 0, done.stderr


def test_generation_that_fails(failing: Installation) -> None:
    """A model whose every third step fails: RUNTIME with the reason, through each way of asking, and the next answer is fine.

    Only that prefix knows the model, so this also shows that a linked program uses the interpreter beside its library.
    """
    done = failing.run(failing.compile(PROGRAMS / "failing.c", "failing", f"-I{PROGRAMS}"), "fails.gguf", env={}, cwd="/")
    assert done.returncode == 0, done.stderr


def test_nothing_is_left_behind(installed: Installation, program: Build, model: Path) -> None:
    done = installed.run(program("memory"), model)
    assert done.returncode == 0, done.stderr
    grown = {what: int(kib) for what, kib in map(str.split, done.stdout.splitlines())}
    assert set(grown) == {"calls", "answers", "threads", "reloads"}
    assert all(kib < 1024 for kib in grown.values()), grown


def test_the_examples(installed: Installation, model: Path, tmp_path: Path) -> None:
    """Built by their own Makefile and run as a newcomer would."""
    examples = PROGRAMS.parents[2] / "examples_c"
    built = installed.run("make", "-C", examples, f"OUT={tmp_path}", "CFLAGS=-O2 -Wall -Wextra -Werror")
    assert built.returncode == 0, built.stderr
    library = installed.lib / "libvllm.so"
    embedder = embeddings.model("bert-s1-z0-F32").write(tmp_path / "embedder.gguf")
    refused = installed.run(tmp_path / "embed", model)
    assert (refused.returncode, "does not embed" in refused.stderr) == (1, True)
    for name, more, said in [
        ("complete", [], "ended by: "),
        ("stream", [], "Once upon a time"),
        ("chat", [], "chunks"),
        ("requests", [], "4 requests are running"),
        ("offload", [], "unknown key"),
        ("dlopen", [library], "interface 21 says:"),
        ("embed", [], "-- 3 rows of 256 floats, from "),
    ]:
        assert len((examples / f"{name}.c").read_text().splitlines()) < 80
        done = installed.run(tmp_path / name, embedder if name == "embed" else model, *more, cwd="/")
        assert done.returncode == 0, (name, done.stdout, done.stderr)
        assert said in done.stdout, (name, done.stdout)
        refused = installed.run(tmp_path / name, "/nonexistent.gguf", *more)
        assert refused.returncode == 1, (name, refused.stdout)
        assert "/nonexistent.gguf" in refused.stdout + refused.stderr
        assert installed.run(tmp_path / name).returncode == 2
