"""Tokens per second of a mixture-of-experts model larger than memory: streamed, borrowed, and llama.cpp's mmap, in one run.

Owns the comparison. Every arm is a process of its own in a memory control group with the same limit, begins with the model's pages out of
the page cache, and takes its turn in every round; medians are compared. Must not know how slices are read. Run it as root, or where control
groups may be made; the limit is a part of the file's size, or none.

    python -m benchmarks.streaming model.gguf --limit 0.4 --slots 1650 --peer path/to/llama-bench

Decoded tokens are random ones, as llama-bench's are: each goes its own way through the experts, and nothing repeats. `--text` continues an
English text instead, whose routing is that of use. Two bounds stand beside the streamed arms, measured in the same round: the same steps
without a limit on warm pages ("resident"), and the drive's rate for reads of a slice's size by as many lanes, over the bytes a token read.
"Reads" is what lanes brought in while there was anything to bring, over that rate. The budget is what the process may say it needs: arena,
copied weights, KV cache, states, and what `--plan` spares for everything else.

`--warm N` goes through the prompt and N tokens before the clock starts, `--prompts M` through M prompts of other tokens instead of one:
their speeds are kept too, for each chooses slices that none before it chose. `--fits` compares a model that fits in memory on warm pages:
streamed with a slot for every slice, borrowed, and llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

PAUSE_S = 0.5
LOOK_S = 0.005  # ten times as often took 3 % of the speed on two cores
RATE_S = 1.5  # of measuring the drive
LANES = 4
RESIDENT = "resident, no limit"
PEER_TOKENS = 16  # at most, of llama.cpp: each takes seconds, and none is easier than the one before
TEXT = "The history of the lighthouse begins long before there were engineers to build one. On the hills above the harbour"
ROOT = Path("/sys/fs/cgroup")


# ---- the limit


@contextmanager
def memory_group(limit: int | None) -> Iterator[Path | None]:
    """A control group with that many bytes of memory; the folder a process joins by writing its number into `cgroup.procs`."""
    if limit is None:
        yield None
        return
    second = (ROOT / "cgroup.controllers").exists()
    folder = (ROOT if second else ROOT / "memory") / f"vllm-streaming-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(limit))
        if second:
            (folder / "memory.swap.max").write_text("0")
        yield folder
    finally:
        for _ in range(50):  # its processes are gone, its pages go with it
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def peak_of(folder: Path | None) -> int | None:
    """The most memory the group used, page cache included."""
    for name in ("memory.peak", "memory.max_usage_in_bytes"):
        if folder is not None and (folder / name).exists():
            return int((folder / name).read_text())
    return None


def forget_pages(model: Path) -> None:
    """Out of the page cache; by itself, so that nothing else on the machine turns cold."""
    with model.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_pages(model: Path) -> None:
    """Into the page cache."""
    with model.open("rb", buffering=0) as file:
        while file.read(16 << 20):
            pass


def run_limited(command: list[str], environment: dict[str, str], limit: int | None) -> tuple[str, int | None]:
    """Standard output of the command, and the group's peak."""
    done, peak = run_in_group(command, environment, limit)
    return done.stdout, peak


def run_in_group(
    command: list[str], environment: dict[str, str], limit: int | None
) -> tuple[subprocess.CompletedProcess[str], int | None]:  # fmt: skip
    """The same, with standard error as well."""
    with memory_group(limit) as folder:

        def join() -> None:
            if folder is not None:
                (folder / "cgroup.procs").write_text(str(os.getpid()))

        result = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **environment}, preexec_fn=join
        )  # fmt: skip
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}: {result.stderr.strip()[-800:]}")
        return result, peak_of(folder)


# ---- the arms


class Watch(threading.Thread):
    """Looks again and again whether a slice is being waited for: `missing` is the part of the time in which one was."""

    def __init__(self, runner: Any) -> None:
        super().__init__(name="watch", daemon=True)
        stream = runner._stream
        self._words = None if stream is None else stream._process.store._record
        self._looks = self._found = 0
        self._over = threading.Event()

    def run(self) -> None:
        from vllm_cpp.kernels.cpu.slots import ENDED_READS, POSTED

        while self._words is not None and not self._over.wait(LOOK_S):
            self._looks += 1
            self._found += bool(self._words[POSTED] != self._words[ENDED_READS])

    def missing(self) -> float | None:
        self._over.set()
        self.join()
        return self._found / self._looks if self._looks else None


def measure_here(model: Path, threads: int, prompt: int, generate: int, warm: int, prompts: int, seed: int) -> dict[str, Any]:
    """In the child: the runner under random tokens, without sampling, as llama-bench measures. Of the figures, "prefills" are the speeds of
    all prompts in their order, those before the clock started included."""
    from vllm_cpp import models
    from vllm_cpp.config import offload
    from vllm_cpp.config.engine import DEFAULT_BLOCK_SIZE, EngineParams
    from vllm_cpp.gguf_file import open_model
    from vllm_cpp.residency import forecast
    from vllm_cpp.residency.slots import cell_bytes
    from vllm_cpp.scheduler.batch import Chunk

    draw = random.Random(seed)
    start = time.perf_counter()
    with open_model(model) as opened:
        num_blocks = -(-(prompt + generate) // DEFAULT_BLOCK_SIZE)
        params = EngineParams(model_path=str(model), threads=threads, max_num_seqs=1, num_blocks=num_blocks)
        residency = offload.install(offload.parse(None))
        runner = models.load(opened, params, residency)
        blocks, at = list(range(num_blocks)), 0

        def step(count: int) -> None:
            nonlocal at
            runner.run([Chunk([draw.randrange(runner.vocab_size) for _ in range(count)], at, blocks, True)])
            at += count

        load_s, prefills = time.perf_counter() - start, []
        for _ in range(prompts or int(warm > 0)):
            at, began = 0, time.perf_counter()
            step(prompt)
            prefills.append(prompt / (time.perf_counter() - began))
        for _ in range(warm):
            at = 0 if at + 1 > prompt + generate else at
            step(1)
        at, began = 0, time.perf_counter()
        step(prompt)
        first, before = time.perf_counter(), runner.stats().get("expert_stream")
        watch, marks = Watch(runner), [first]
        watch.start()
        for _ in range(generate):
            step(1)
            marks.append(time.perf_counter())
        missing, stats = watch.missing(), runner.stats().get("expert_stream")
        kept = models.kv_cache_bytes(opened, params, residency) + models.state_bytes(opened, params, residency)
        arena = stats["slots"] * cell_bytes(stats["slot_bytes"]) if stats else 0
        budget = forecast.WORKING_BYTES + kept + runner._weights.copied_bytes + arena
        runner.close()
    figures = {**_figures(load_s, first - began, prompt, marks, stats), "budget": budget if stats else None}
    figures["prefills"] = [*prefills, figures["prefill"]]
    if stats and before:
        read = stats["bytes"] - before["bytes"]
        asked, hits = (sum(stats[n] - before[n] for n in names) for names in (("hits", "misses"), ("hits",)))
        figures |= {"token_bytes": read / generate, "decode_hits": hits / asked}
        figures["missing_rate"] = read / (missing * (marks[-1] - first)) if missing and read else None
    return figures


def generate_here(model: Path, threads: int, generate: int, seed: int) -> dict[str, Any]:
    """In the child: an English text goes on."""
    import vllm_cpp

    start = time.perf_counter()
    with vllm_cpp.load(model, threads=threads, max_num_seqs=1) as llm:
        loaded, marks = time.perf_counter(), []
        with llm.stream(TEXT, max_tokens=generate + 1, temperature=0.8, seed=seed, ignore_eos=True) as stream:
            for _ in stream:
                marks.append(time.perf_counter())
            prompt = stream.completion.prompt_tokens
            timings = stream.completion.timings
        stats = llm.stats()["expert_stream"]
    marks = [marks[0] + i * (timings.finished - timings.first_token) / generate for i in range(generate + 1)]
    return _figures(loaded - start, timings.first_token - timings.submitted, prompt, marks, stats)


def _figures(load_s: float, first_s: float, prompt: int, marks: list[float], stats: dict[str, Any] | None) -> dict[str, Any]:
    half = len(marks) // 2
    return {
        "load_s": load_s,
        "prefill": prompt / first_s,
        "decode": (len(marks) - 1) / (marks[-1] - marks[0]),
        "second_half": (len(marks) - 1 - half) / (marks[-1] - marks[half]),
        "seconds": marks[-1] - marks[0] + first_s,
        "expert_stream": stats,
    }


def drive_rate(model: Path, lanes: int) -> float:
    """Bytes a second of reading slices past the page cache, in random order, by so many lanes."""
    from vllm_cpp.gguf_file import open_model
    from vllm_cpp.kernels.cpu.slots import ALIGNMENT
    from vllm_cpp.residency.disk import read_rate
    from vllm_cpp.residency.streaming import expert_layers

    with open_model(model) as opened:
        towers = [info for layer in expert_layers(opened) for info in layer]
        draw = random.Random()
        picks = [(info, draw.randrange(info.shape[0])) for info in draw.choices(towers, k=4000)]
        size = -(-max(info.slice_bytes for info in towers) // ALIGNMENT) * ALIGNMENT
        places = [(info.file_offset + e * info.slice_bytes) & -ALIGNMENT for info, e in picks]
    fd = os.open(model, os.O_RDONLY | os.O_DIRECT)
    try:
        return read_rate(fd, places, size, lanes, RATE_S)
    finally:
        os.close(fd)


def slice_count(model: Path) -> int:
    """A slot for each of these, and nothing is ever read twice."""
    from vllm_cpp.gguf_file import open_model
    from vllm_cpp.residency.streaming import expert_layers

    with open_model(model) as opened:
        return sum(info.shape[0] for layer in expert_layers(opened) for info in layer)


def arms(args: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str]]]:
    """The command and the environment of each arm, by name."""
    child = [sys.executable, "-m", "benchmarks.streaming", str(args.model), "--child"]
    child += [f"--{name}={getattr(args, name)}" for name in ("threads", "prompt", "generate", "warm", "prompts")] + ["--text"] * args.text
    found = {}
    for slots in [slice_count(args.model)] if args.fits else args.slots:
        stream = {"VT_MOE_EXPERT_STREAM": "1", "VT_MOE_EXPERT_STREAM_SLOTS": str(slots), "VT_MOE_EXPERT_STREAM_STATS_EVERY": "0"}
        found[f"streamed, {slots} slots"] = child, stream
    if not args.text and not args.fits:
        found[RESIDENT] = child, {"VT_MOE_EXPERT_STREAM": "0"}
    found["borrowed"] = child, {"VT_MOE_EXPERT_STREAM": "0"}
    if args.peer:
        bench = [str(args.peer.resolve()), *["-r", "1", "-o", "json", "--no-warmup"], "-m", str(args.model), "-t", str(args.threads)]
        bench += ["-p", str(args.prompt), "-n", str(args.generate if args.fits else min(args.generate, PEER_TOKENS))]
        found["llama.cpp mmap"] = bench, {"LD_LIBRARY_PATH": f"{args.peer.resolve().parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    return {name: arm for name, arm in found.items() if not args.only or re.search(args.only, name)}


def read_peer(text: str) -> dict[str, Any]:
    rows = json.loads(text)
    return {"prefill" if row["n_prompt"] else "decode": row["avg_ts"] for row in rows}


HEADS = ("arm", "decode, tok/s", "over the last", "second half", "prefill, tok/s", "load, s", "hits", "drive bound, tok/s", "of the bound",
         "reads", "peak, GB")  # fmt: skip


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: medians, with the range of the rounds for decoding; each arm's decoding over the last one's."""
    lines = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    base = median(row["decode"] for row in list(results.values())[-1])
    resident = results.get(RESIDENT, [])
    for name, rows in results.items():
        decode = [row["decode"] for row in rows]

        def middle(key: str, form: str, rows: list[dict[str, Any]] = rows) -> str:
            return format(median(row[key] for row in rows), form) if all(row.get(key) is not None for row in rows) else ""

        bound = of_it = reads = ""
        if all(row.get("drive_rate") and row.get("token_bytes") for row in rows):
            drive = [row["drive_rate"] / row["token_bytes"] for row in rows]
            both = [min(d, r["decode"]) for d, r in zip(drive, resident, strict=True)] if len(resident) == len(rows) else drive
            bound = f"{median(drive):.1f} ({median(row['drive_rate'] for row in rows) / 1e9:.2f} GB/s)"
            of_it = _percent(median(row["decode"] / least for row, least in zip(rows, both, strict=True)))
            if all(row.get("missing_rate") for row in rows):
                reads = _percent(median(row["missing_rate"] / row["drive_rate"] for row in rows))
        peak = f"{median(row['peak'] for row in rows) / 1e9:.2f}" if rows[0].get("peak") else ""
        if peak and rows[0].get("budget"):
            peak += f" ({_percent(median(row['peak'] / row['budget'] for row in rows))} of the budget)"
        cells = [name, f"{median(decode):.2f} ({min(decode):.2f} to {max(decode):.2f})", f"{median(decode) / base:.1f}"]
        cells += [
            middle("second_half", ".2f"),
            middle("prefill", ".1f"),
            middle("load_s", ".1f"),
            middle("decode_hits", ".1%").replace("%", " %"),
            bound,
            of_it,
        ]
        lines.append("| " + " | ".join([*cells, reads, peak]) + " |")
    return "\n".join(lines)


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def compare(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The figures of every round, by arm; the arms take turns."""
    limit = limit_of(args)
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for name, (command, environment) in arms(args).items():
            warm = args.fits or name == RESIDENT
            (read_pages if warm else forget_pages)(args.model)
            rates = [drive_rate(args.model, LANES)] if "VT_MOE_EXPERT_STREAM_SLOTS" in environment and not warm else []
            time.sleep(PAUSE_S)
            output, peak = run_limited(command, environment, None if warm else limit)
            figures = read_peer(output) if "--child" not in command else json.loads(output)
            if rates:  # of a drive that others use as well: the better of before and after
                figures["drive_rate"] = max(*rates, drive_rate(args.model, figures["expert_stream"]["lanes"]))
            results.setdefault(name, []).append({**figures, "peak": peak})
            print(f"{name}: {figures['decode']:.2f} tok/s", file=sys.stderr, flush=True)
    return results


def limit_of(args: argparse.Namespace) -> int | None:
    return None if args.limit is None else int(args.limit * args.model.stat().st_size)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description="Tokens per second of a mixture-of-experts model larger than memory.")
    found.add_argument("model", type=Path)
    found.add_argument("--limit", type=float, help="memory limit as a part of the file's size; none if left out")
    found.add_argument("--slots", type=lambda text: [int(n) for n in text.split(",")], default=[64], help="numbers of slots (default: 64)")
    found.add_argument("--peer", type=Path, help="a llama-bench executable")
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--prompt", type=int, default=16)
    found.add_argument("--generate", type=int, default=64)
    found.add_argument("--warm", type=int, default=0, help="tokens that are decoded before the clock starts, behind a prompt")
    found.add_argument(
        "--prompts", type=int, default=0, help="prompts before the clock starts (default: one, if any token is decoded then)"
    )
    found.add_argument("--rounds", type=int, default=1)
    found.add_argument("--text", action="store_true", help="continue an English text instead of decoding random tokens")
    found.add_argument("--fits", action="store_true", help="a slot for every slice, warm pages, no limit: what streaming costs")
    found.add_argument("--only", help="arms whose name this pattern finds")
    found.add_argument("--json", type=Path, help="also write every round to this file")
    found.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return found


def main() -> None:
    args = parser().parse_args()
    if args.child:
        seed = args.prompt
        figures = (
            generate_here(args.model, args.threads, args.generate, seed)
            if args.text
            else measure_here(args.model, args.threads, args.prompt, args.generate, args.warm, args.prompts, seed)
        )
        print(json.dumps(figures))
        return
    results, limit = compare(args), limit_of(args)
    about = {"model": args.model.name, "bytes": args.model.stat().st_size, "limit": limit, "date": time.strftime("%Y-%m-%d")}
    print(f"{about['model']}, {about['bytes']} bytes, limit {limit}, {platform.machine()}, median of {args.rounds}\n\n{table(results)}")
    if args.json:
        args.json.write_text(json.dumps({**about, "arms": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
