"""Everything that docs/benchmarks.md says about expert streaming, measured in one go and written as its tables.

Owns the choice of models, limits and rounds; `benchmarks/streaming.py` measures. Two models of `make_moe` (64 and 128 experts of which 4
compute) run with a memory limit of 40 % of the file, with as many slots as `vllm-cli --plan` proposes under that limit, and without a limit
on warm pages, with a slot for every slice; then an engine runs on, and engines come and go, with their memory watched. It takes about 15
minutes. Missing models are made first, from the demo's dense one. Run it as root, or where control groups may be made.

    python -m benchmarks.streaming_report --peer path/to/llama-bench --out build/expert-streaming.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import fetch_smollm2, make_moe, streaming

EXPERTS = (64, 128)
TOP_K, SKEW = 4, 1.0
LIMIT = 0.4
FITS = ["--fits", "--prompt", "512", "--generate", "64", "--warm", "200", "--prompts", "4"]
STEPS, CYCLES, WARM_CYCLES = 500, 50, 20

PLAN = """
import json, sys, vllm_cpp
from vllm_cpp.cli.plan import facts
print(json.dumps(facts(vllm_cpp.plan(sys.argv[1], measure=True, threads=2, max_num_seqs=1, num_blocks=4))))
"""

# In a process of its own. The first rounds bring in pages that stay; what the C library's allocator keeps for later is no memory in use.
STEADY = """
import ctypes, gc, sys, vllm_cpp

def anonymous_kib():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

def generate(llm, tokens):
    llm.generate("The lighthouse", max_tokens=tokens, temperature=0.8, seed=1, ignore_eos=True)

model, steps, cycles, warm = sys.argv[1], *map(int, sys.argv[2:])
with vllm_cpp.load(model, max_num_seqs=1, num_blocks=-(-(steps + 16) // 32)) as llm:
    generate(llm, steps)
    before = anonymous_kib()
    generate(llm, steps)
    print(anonymous_kib() - before)
for cycle in range(warm + cycles):
    if cycle == warm:
        before = anonymous_kib()
    with vllm_cpp.load(model, max_num_seqs=1, num_blocks=2) as llm:
        generate(llm, 2)
print(anonymous_kib() - before)
"""


def model_file(folder: Path, experts: int, top_k: int = TOP_K) -> Path:
    """The model with so many experts, made if it is not there."""
    path = folder / f"moe-{experts}.gguf"
    if not path.exists():
        print(f"making {path}", file=sys.stderr, flush=True)
        make_moe.make(fetch_smollm2.dense(), path, experts=experts, top_k=top_k, skew=SKEW)
    return path


def plan_of(model: Path, limit: int | None) -> dict[str, Any]:
    """The forecast under a limit, as `vllm-cli --plan` prints it, for an engine with as small a KV cache as the arms have."""
    return json.loads(streaming.run_limited([sys.executable, "-c", PLAN, str(model)], {}, limit)[0])


def limited(model: Path, peer: Path | None, rounds: int) -> Iterator[str]:
    """One model beyond its memory."""
    limit = int(LIMIT * model.stat().st_size)
    plan = plan_of(model, limit)["streaming"]
    proposed = plan["proposed"]
    given = [str(model), "--limit", str(LIMIT), "--slots", str(proposed["slots"]), "--rounds", str(rounds)]
    args = streaming.parser().parse_args(given + (["--peer", str(peer)] if peer else []))
    yield f"`{model.name}`, {model.stat().st_size / 1e9:.2f} GB, in {limit / 1e9:.2f} GB of memory, cold. Median of {rounds} rounds.\n"
    yield streaming.table(streaming.compare(args)) + "\n"
    yield (
        f"The plan under this limit proposed these {proposed['slots']} slots, measured {plan['drive_bytes_per_s'] / 1e9:.2f} GB/s of the "
        f"drive, and expected {100 * proposed['hit_rate']:.0f} % hits ({100 * proposed['even_hit_rate']:.0f} % were routing even) and "
        f"{proposed['tokens_per_s']:.1f} tok/s ({proposed['even_tokens_per_s']:.1f}).\n"
    )


def fitting(model: Path, peer: Path | None, rounds: int) -> Iterator[str]:
    """The same model with memory to spare: what streaming costs."""
    args = streaming.parser().parse_args([str(model), *FITS, "--rounds", str(rounds), *(["--peer", str(peer)] if peer else [])])
    results = streaming.compare(args)
    yield f"`{model.name}` without a limit, warm, a slot for every slice; prompt of 512 tokens.\n"
    yield streaming.table(results) + "\n"
    (streamed, borrowed) = list(results.values())[:2]
    decode, prefill = (median(a[key] / b[key] for a, b in zip(streamed, borrowed, strict=True)) for key in ("decode", "prefill"))
    yield f"Streamed over borrowed, round by round: decode {decode:.2f}, prefill {prefill:.2f}.\n"
    rates = [
        ", ".join(f"{median(each):.0f}" for each in zip(*(row["prefills"] for row in rows), strict=True)) for rows in (streamed, borrowed)
    ]
    yield (
        f"The prompts one after the other, each of other tokens, of which the last one stands in the table: streamed {rates[0]} tok/s, "
        f"borrowed {rates[1]}. The first ones pay for reading slices for the first time.\n"
    )


def steady(model: Path) -> Iterator[str]:
    """What stays behind, in KiB of anonymous memory."""
    slots = plan_of(model, int(LIMIT * model.stat().st_size))["streaming"]["proposed"]["slots"]
    stream = {"VT_MOE_EXPERT_STREAM": "1", "VT_MOE_EXPERT_STREAM_SLOTS": str(slots), "VT_MOE_EXPERT_STREAM_STATS_EVERY": "0"}
    command = [sys.executable, "-c", STEADY, str(model), *map(str, (STEPS, CYCLES, WARM_CYCLES))]
    output, _ = streaming.run_limited(command, stream, None)
    steps, cycles = (int(line) for line in output.split())
    yield (
        f"`{model.name}` with {slots} slots: {STEPS} decoded tokens after as many others took {steps} KiB more, and {CYCLES} engines that "
        f"were loaded, used and closed after {WARM_CYCLES} others left {cycles} KiB behind.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The tables about expert streaming in docs/benchmarks.md.")
    parser.add_argument("--models", type=Path, default=fetch_smollm2.MODELS, help="where the models are, or are made (10 GB)")
    parser.add_argument("--peer", type=Path, help="a llama-bench executable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--experts", type=lambda text: [int(n) for n in text.split(",")], default=list(EXPERTS))
    parser.add_argument("--out", type=Path, default=Path("build/expert-streaming.md"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    models = [model_file(args.models, experts) for experts in args.experts]
    subprocess.run(["sync"], check=True)  # pages that were just written cannot be dropped
    with args.out.open("w") as out:

        def write(text: str) -> None:
            print(text, flush=True)
            print(text, file=out, flush=True)

        write(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} logical processors.\n")
        for model in models:
            for line in [*limited(model, args.peer, args.rounds), *fitting(model, args.peer, args.rounds)]:
                write(line)
        write("".join(steady(models[0])))


if __name__ == "__main__":
    main()
