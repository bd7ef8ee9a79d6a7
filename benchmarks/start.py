"""Seconds from the start of a process to its first token, and its peak memory: with kernels to be compiled, and with kernels on disk.

Owns these two numbers as a user of the shell meets them. Must not know what happens in between.

    python -m benchmarks.start model.gguf
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.decode import machine

PROMPT = "The capital of France is"


@dataclass(frozen=True, slots=True)
class Start:
    first_token_s: float
    peak_rss_bytes: int  # pages of the mapped model that are in memory are part of it


def start(model: Path, cache: Path, prompt: str = PROMPT) -> Start:
    """One run of vllm-cli in a process of its own, which finds its kernels in `cache` or puts them there."""
    command = [sys.executable, "-m", "vllm_cpp.cli", "--model", str(model), "--prompt", prompt, "--stream"]
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "VLLM_CPP_CACHE_DIR": str(cache)}) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.monotonic() - begin
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if not first or process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} and {'a' if first else 'no'} token")
    return Start(seconds, usage.ru_maxrss * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds to the first token, and peak memory.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="warm starts to take the median of")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first_ever = start(args.model, Path(folder))
        warm = [start(args.model, Path(folder)) for _ in range(args.rounds)]
    size = args.model.stat().st_size
    print(f"{args.model.name} ({size / 1e6:.0f} MB), {time.strftime('%Y-%m-%d')}, {machine()}\n")
    print("| start | first token, s | peak memory, MB | over the mapped file, MB |\n|---|---|---|---|")
    for name, runs in (("first ever, compiling", [first_ever]), (f"kernels on disk, median of {args.rounds}", warm)):
        peak = max(run.peak_rss_bytes for run in runs)
        print(f"| {name} | {median(run.first_token_s for run in runs):.1f} | {peak / 1e6:.0f} | {(peak - size) / 1e6:.0f} |")


if __name__ == "__main__":
    main()
