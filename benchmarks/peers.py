"""llama.cpp's own benchmarks, run on the same file: llama-bench for one sequence, llama-batched-bench for several.

Owns their command lines and the reading of their answers. Must not know ours.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Case, Result


def llama_bench(peer: Path, model: Path, threads: int, tests: Sequence[Case]) -> Iterator[Result]:
    """The tests of one sequence, in one run of llama-bench, which warms up by itself."""
    single = [test for test in tests if test.batch == 1]
    if not single:
        return
    sizes = {kind: _one({test.tokens for test in single if test.kind == kind}) for kind in ("pp", "tg")}
    depths = ",".join(str(n) for n in sorted({test.context for test in single}))
    rows = json.loads(_run(peer, "-m", model, "-t", threads, "-p", sizes["pp"], "-n", sizes["tg"], "-d", depths, "-r", 1, "-o", "json"))
    for row in rows:
        kind, tokens = ("pp", row["n_prompt"]) if row["n_prompt"] else ("tg", row["n_gen"])
        test = Case(kind, tokens, row.get("n_depth", 0), 1)
        if test in single:
            yield Result(f"llama.cpp {row['build_commit']}", threads, test, row["avg_ts"])


def llama_batched_bench(peer: Path, model: Path, threads: int, tests: Sequence[Case], name: str) -> Iterator[Result]:
    """The tests of several sequences, each with a prompt of its own. Nothing where that program does not stand beside llama-bench."""
    program = peer.with_name("llama-batched-bench")
    several = [test for test in tests if test.batch > 1 and test.kind == "tg"]
    if not several or not program.exists():
        return
    for context in sorted({test.context for test in several}):
        here = [test for test in several if test.context == context]
        tokens, batches = _one({test.tokens for test in here}), sorted({test.batch for test in here})
        prompt = max(context, 1)
        room = max(batches) * (prompt + tokens)
        answer = _run(
            program, "-m", model, "-t", threads, "-tb", threads, "-c", room, "-npp", prompt, "-ntg", tokens,
            "-npl", ",".join(map(str, batches)), "--output-format", "jsonl",
        )  # fmt: skip
        for line in answer.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                yield Result(name, threads, Case("tg", tokens, context, row["pl"]), row["speed_tg"])


def _one(sizes: set[int]) -> int:
    """The one number of tokens these tests ask for; 0 for none."""
    if len(sizes) > 1:
        raise ValueError(f"llama.cpp's benchmarks take one number of tokens a run, not {sorted(sizes)}")
    return next(iter(sizes), 0)


def _run(program: Path, *options: Any) -> str:
    libraries = f"{program.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    command = [str(part) for part in (program, *options)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LD_LIBRARY_PATH": libraries})
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip()[-500:]}")
    return result.stdout
