"""The worked example of docs/expert-streaming.md: a model of 512 experts, 25 GB, on this machine as it is.

Owns the example. Every arm starts cold, loads, answers a prompt, and then another one with what it has learnt; no limit is set but the
machine's memory. Must not know how experts are streamed. The model is made first if it is not there. Takes some minutes.

    python -m benchmarks.larger_than_memory --peer path/to/llama-bench --out build/larger-than-memory.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import fetch_smollm2, streaming
from benchmarks.streaming_report import model_file

EXPERTS = 512
PAUSE_S = 25  # before every arm: a virtual machine gives freed memory back to its host, and an arm that came at once would still have it
PROMPTS = (streaming.TEXT, "Bread is among the oldest of prepared foods. A baker who wanted a good crumb began with the flour, and")
ROWS = (
    ("load, s", "load_s", ".1f"),
    ("first token, s", "first_s", ".1f"),
    ("tok/s, first answer", "first_rate", ".1f"),
    ("tok/s, second answer", "second_rate", ".1f"),
    ("hits, first answer", "first_hits", ".0%"),
    ("hits, second answer", "second_hits", ".0%"),
    ("memory of its own, GB", "own", ".2f"),
)


def answer_here(model: Path, tokens: int, context: int) -> dict[str, Any]:
    """In the child: load, and answer one prompt after the other."""
    import vllm_cpp

    start = time.perf_counter()
    with vllm_cpp.load(model, max_num_seqs=1, max_model_len=context) as llm:
        figures: dict[str, Any] = {"load_s": time.perf_counter() - start}
        before = {"hits": 0, "misses": 0}
        for name, prompt in zip(("first", "second"), PROMPTS, strict=True):
            timings = llm.generate(prompt, max_tokens=tokens, temperature=0.8, seed=1, ignore_eos=True).timings
            figures.setdefault("first_s", timings.first_token - timings.submitted)
            figures[f"{name}_rate"] = (tokens - 1) / (timings.finished - timings.first_token)
            stats = llm.stats()["expert_stream"]
            if stats:
                hits, misses = (stats[key] - before[key] for key in ("hits", "misses"))
                figures[f"{name}_hits"], before = hits / (hits + misses), stats
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            figures["own"] = int(status["RssAnon"].split()[0]) * 1024 / 1e9  # it only grows: the arena fills up
    return figures | {"stats": stats}


def table(arms: dict[str, dict[str, Any]]) -> str:
    """Markdown: an arm a column."""
    lines = [f"| | {' | '.join(arms)} |", "|" + "---|" * (1 + len(arms))]
    for label, key, form in ROWS:
        cells = (format(arm[key], form).replace("%", " %") if arm.get(key) is not None else "" for arm in arms.values())
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def start_cold(model: Path) -> None:
    """Neither the file's pages in memory nor memory left over from an arm before."""
    streaming.forget_pages(model)
    time.sleep(PAUSE_S)


def run_child(args: argparse.Namespace, model: Path, environment: dict[str, str], limit: int | None) -> tuple[dict[str, Any], str]:
    """The figures, and what was said on standard error."""
    start_cold(model)
    command = [sys.executable, "-m", "benchmarks.larger_than_memory", "--child", str(model)]
    command += ["--tokens", str(args.tokens), "--context", str(args.context)]
    done, _ = streaming.run_in_group(command, environment, limit)
    return json.loads(done.stdout), done.stderr


def peer_figures(peer: Path, model: Path, threads: int, limit: int | None) -> dict[str, Any]:
    start_cold(model)
    command = [str(peer.resolve()), *["-r", "1", "-o", "json", "--no-warmup", "-p", "0", "-n", "16"], "-m", str(model), "-t", str(threads)]
    environment = {"LD_LIBRARY_PATH": f"{peer.resolve().parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    return {"first_rate": streaming.read_peer(streaming.run_limited(command, environment, limit)[0])["decode"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="A model larger than this machine's memory, with and without expert streaming.")
    parser.add_argument("--models", type=Path, default=fetch_smollm2.MODELS, help="where the model is, or is made")
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--context", type=int, default=1024, help="the longest an answer and its prompt may be, in tokens")
    parser.add_argument("--limit", type=float, help="a memory limit in GB, where others need the rest of the machine")
    parser.add_argument("--peer", type=Path, help="a llama-bench executable")
    parser.add_argument("--out", type=Path, default=Path("build/larger-than-memory.md"))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(answer_here(args.child, args.tokens, args.context)))
        return
    model = model_file(args.models, args.experts)
    limit = None if args.limit is None else int(args.limit * 1e9)
    subprocess.run(["sync"], check=True)
    planned = [sys.executable, "-m", "vllm_cpp.cli", "--model", str(model), "--plan", "--max-model-len", str(args.context)]
    text = streaming.run_limited(planned, {}, limit)[0].partition("\n\n")[0]
    slots = json.loads(streaming.run_limited([*planned, "--json"], {}, limit)[0])["streaming"]["proposed"]["slots"]
    stream = {"VT_MOE_EXPERT_STREAM": "1", "VT_MOE_EXPERT_STREAM_SLOTS": str(slots)}
    arms = {}
    arms["streamed"], said = run_child(args, model, stream, limit)
    arms["borrowed"], _ = run_child(args, model, {"VT_MOE_EXPERT_STREAM": "0"}, limit)
    if args.peer:
        arms["llama.cpp mmap"] = peer_figures(args.peer, model, 2, limit)
    text = text.replace(f"{model.parent}/", "")
    lines = [line for line in said.splitlines() if line.startswith("[expert-stream]")]
    document = f"{time.strftime('%Y-%m-%d')}\n\n```\n{text}\n```\n\n```\n{lines[0]}\n{lines[-1]}\n```\n\n{table(arms)}\n"
    print(document)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(document)


if __name__ == "__main__":
    main()
