"""Tokens per second of prefill (pp) and decode (tg), as llama-bench counts them, and beside llama-bench in the same run.

Owns the measurement of whole steps. Must not know kernels. pp N is a prompt of N random tokens up to its first logits; tg N is N tokens
generated after a prompt of one. Ours includes sampling, stop checks and text, as every caller pays them; llama-bench's has none of these.
The contenders take turns (A B A B ...), each loading the model anew, so that neither is measured beside the other's idle threads and a
drift of the machine meets both; the medians of the rounds are compared.

    python -m benchmarks.decode model.gguf --peer path/to/llama-bench --threads 1,2 --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import vllm_cpp

PAUSE_S = 0.3  # worker threads of the contender before spin on for a moment


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of one contender in one round."""

    contender: str
    threads: int
    prefill: float
    decode: float


def measure(model: Path, threads: int, prompt: int, generate: int, seed: int) -> Rates:
    """Load, warm up, and time one prompt and one generation."""
    draw = random.Random(seed)
    with vllm_cpp.load(model, threads=threads, max_num_seqs=1) as llm:

        def run(n_prompt: int, n_new: int) -> Any:
            ids = [draw.randrange(llm.tokenizer.vocab_size) for _ in range(n_prompt)]
            return llm.generate(ids, max_tokens=n_new, temperature=0, ignore_eos=True).timings

        run(prompt, 2)
        timings = run(prompt, 1)
        prefill = prompt / (timings.first_token - timings.submitted)
        timings = run(1, generate + 1)
        return Rates("vllm_cpp", threads, prefill, generate / (timings.finished - timings.first_token))


def measure_peer(peer: Path, model: Path, threads: int, prompt: int, generate: int) -> Rates:
    """One run of llama-bench, which warms up by itself."""
    options = ["-m", model, "-t", threads, "-p", prompt, "-n", generate, "-r", 1, "-o", "json"]
    libraries = f"{peer.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    command = [str(part) for part in (peer, *options)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LD_LIBRARY_PATH": libraries})
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip()[-500:]}")
    rows = json.loads(result.stdout)
    rates = {"prefill" if row["n_prompt"] else "decode": row["avg_ts"] for row in rows}
    return Rates(f"llama.cpp {rows[0]['build_commit']}", threads, **rates)


def rounds(contenders: Iterable[Callable[[int, int], Rates]], threads: list[int], count: int) -> list[Rates]:
    """Every contender once a round, in turn; called with the number of threads and of the round."""
    contenders, results = list(contenders), []
    for number in range(count):
        for n in threads:
            for contender in contenders:
                time.sleep(PAUSE_S)
                results.append(contender(n, number))
                print(".", end="", flush=True)
    print()
    return results


def table(results: list[Rates], prompt: int, generate: int) -> str:
    """A Markdown table of medians, with the range of the rounds; the first contender's over each other one's."""
    names = list(dict.fromkeys(rates.contender for rates in results))
    lines = [
        "| test | threads | " + " | ".join(f"{name}, tok/s" for name in names) + "".join(" | ratio" for _ in names[1:]) + " |",
        "|---|---|" + "---|" * (2 * len(names) - 1),
    ]
    for test, field in ((f"pp{prompt}", "prefill"), (f"tg{generate}", "decode")):
        for threads in dict.fromkeys(rates.threads for rates in results):
            values = [[getattr(r, field) for r in results if (r.contender, r.threads) == (name, threads)] for name in names]
            cells = [f"{median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in values]
            cells += [f"**{median(values[0]) / median(v):.2f}**" for v in values[1:]]
            lines.append(f"| {test} | {threads} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine() -> str:
    """The processor, as the kernel names it, and how many the process may use."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} logical processors"


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second, beside llama.cpp's llama-bench.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", type=Path, help="a llama-bench executable to take turns with")
    parser.add_argument("--threads", default="1,2", help="numbers of worker threads (default: 1,2)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt (default: 512)")
    parser.add_argument("--generate", type=int, default=128, help="tokens generated (default: 128)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    args = parser.parse_args()

    contenders = [lambda threads, number: measure(args.model, threads, args.prompt, args.generate, number)]
    if args.peer:
        contenders.append(lambda threads, _: measure_peer(args.peer.resolve(), args.model, threads, args.prompt, args.generate))
    results = rounds(contenders, [int(n) for n in args.threads.split(",")], args.rounds)
    about = {"model": args.model.name, "date": time.strftime("%Y-%m-%d"), "machine": machine(), "vllm_cpp": vllm_cpp.__version__}
    print(f"{about['model']}, {about['date']}, {about['machine']}, median of {args.rounds}\n")
    print(table(results, args.prompt, args.generate))
    if args.json:
        document = {**about, "prompt": args.prompt, "generate": args.generate, "rounds": [asdict(rates) for rates in results]}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
