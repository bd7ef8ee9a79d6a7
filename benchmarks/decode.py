"""Tokens per second of prefill (pp) and decode (tg), as llama-bench counts them, and beside llama.cpp in the same run.

Owns the measurement of whole steps. Must not know kernels. pp N is a prompt of N random tokens up to its first logits; tg N is N tokens
generated, by one sequence or several; both at several depths of context, which is in the KV cache when the clock starts. Ours includes
sampling, stop checks and text, as every caller pays them; llama.cpp's benchmarks have none of these. The contenders take turns (A B A B
...), each loading the model anew, so that neither is measured beside the other's idle threads and a drift of the machine meets both; the
medians of the rounds are compared, and the speed of memory is measured in each round as well.

    python -m benchmarks.decode model.gguf --peer path/to/llama-bench --threads 1,2 --json out.json
    python -m benchmarks.decode model.gguf --contexts 0 --batches 1         (quick)
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import vllm_cpp
from benchmarks.peers import llama_batched_bench, llama_bench
from benchmarks.results import Case, Report, Result
from vllm_cpp.gguf_file import open_model
from vllm_cpp.gguf_file.hparams import read_hyper_parameters

PAUSE_S = 0.3  # worker threads of the contender before spin on for a moment
BLOCK = 32
_MADV_POPULATE_READ = 22
_TOWER = re.compile(r"_(?:ch)?exps\.weight$")


def measure(model: Path, threads: int, tests: Sequence[Case], seed: int) -> Iterator[Result]:
    """Load, warm up, and run every test once."""
    draw = random.Random(seed)
    batch = max(test.batch for test in tests)
    # Room for all tests: a context that was computed for one is found by the next.
    blocks = sum(test.batch * (-(-(test.context + test.tokens) // BLOCK) + 2) for test in tests)
    with vllm_cpp.load(model, threads=threads, max_num_seqs=batch, num_blocks=blocks, block_size=BLOCK) as llm:

        def ids(n: int) -> list[int]:
            return [draw.randrange(llm.tokenizer.vocab_size) for _ in range(n)]

        def run(prompts: list[list[int]], num_new: int, cached: int = 0) -> list[Any]:
            done = llm.generate(prompts, max_tokens=num_new, temperature=0, ignore_eos=True)
            found = {one.cached_prompt_tokens for one in done}
            if found != {cached}:
                raise RuntimeError(f"{sorted(found)} tokens of the prompts were in the KV cache, expected {cached} of each")
            return [one.timings for one in done]

        run([ids(64)], 2)
        filled: dict[int, list[list[int]]] = {}
        for test in tests:
            while len(known := filled.setdefault(test.context, [])) < test.batch:
                known.append(ids(test.context))
                if test.context:
                    run(known[-1:], 1)
            contexts = known[: test.batch]
            if test.kind == "pp":
                (times,) = run([contexts[0] + ids(test.tokens)], 1, test.context)
                seconds = times.first_token - times.submitted
            else:
                times = run([context + ids(1) for context in contexts], test.tokens + 1, test.context)
                # From the first token of any sequence to the last of all: where they did not start together, that counts against us.
                seconds = max(one.finished for one in times) - min(one.first_token for one in times)
            yield Result("vllm_cpp", threads, test, test.batch * test.tokens / seconds)


def measure_peer(peer: Path, model: Path, threads: int, tests: Sequence[Case]) -> Iterator[Result]:
    """The same tests by llama.cpp, as far as its benchmarks know them."""
    results = list(llama_bench(peer, model, threads, tests))
    yield from results
    yield from llama_batched_bench(peer, model, threads, tests, results[0].contender if results else "llama.cpp")


def token_bytes(path: Path, context: int) -> int:
    """Bytes of weights and KV cache that one token of one sequence reads: every matrix once, of towers the chosen experts' share."""
    with open_model(path) as model:
        hp = read_hyper_parameters(model)
        total = 0
        for name, info in model.tensors.items():
            if name == "token_embd.weight" and "output.weight" in model.tensors:
                continue  # one row of it
            layer = re.match(r"blk\.(\d+)\.", name)
            towers = _TOWER.search(name) and layer
            total += info.n_bytes * hp.top_k[int(layer[1])] // hp.num_experts if towers else info.n_bytes
        return total + sum(2 * 2 * heads * hp.key_length * context for heads in hp.num_kv_heads)


def rounds(contenders: Iterable[Callable[[int, int], Iterable[Result]]], threads: list[int], count: int) -> list[Result]:
    """Every contender once a round, in turn; called with the number of threads and of the round."""
    contenders, results = list(contenders), []
    for number in range(count):
        for n in threads:
            for contender in contenders:
                time.sleep(PAUSE_S)
                results += contender(n, number)
                print(".", end="", flush=True)
    print()
    return results


def read_anew(model: Path) -> None:
    """Drop the file's pages and read them in again. Pages of a file that was just written, or read while memory was scarce, lie in small
    pieces, which costs everybody who maps it up to a sixth of the speed; and on a virtual machine the first touch of a page is slow."""
    with model.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not on the disk yet cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            with contextlib.suppress(OSError):  # Linux before 5.14
                pages.madvise(_MADV_POPULATE_READ)
            np.frombuffer(pages, np.uint8)[:: mmap.PAGESIZE].max()


def machine() -> str:
    """The processor, as the kernel names it, and how many the process may use."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} logical processors"


def plan(prompt: int, generate: int, contexts: list[int], batches: list[int], batch_contexts: list[int]) -> list[Case]:
    """One sequence at every context, then several at theirs."""
    single = [Case(kind, n, context) for context in contexts for kind, n in (("pp", prompt), ("tg", generate)) if n]
    return single + [Case("tg", generate, context, batch) for context in batch_contexts for batch in batches if batch > 1]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second, beside llama.cpp.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", type=Path, help="a llama-bench to take turns with (and the llama-batched-bench beside it, for batches)")
    parser.add_argument("--threads", type=numbers, default="1,2", help="numbers of worker threads (default: 1,2)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt; 0 leaves pp out (default: 512)")
    parser.add_argument("--generate", type=int, default=128, help="tokens generated (default: 128)")
    parser.add_argument("--contexts", type=numbers, default="0,1024,4096", help="depths for one sequence (default: 0,1024,4096)")
    parser.add_argument("--batches", type=numbers, default="1,4,16", help="numbers of sequences that decode together (default: 1,4,16)")
    parser.add_argument("--batch-contexts", type=numbers, default="0", help="depths for several sequences (default: 0)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write every round to this file; benchmarks/plot.py draws it")
    args = parser.parse_args()

    from benchmarks.bandwidth import read_gb_s

    tests = plan(args.prompt, args.generate, args.contexts, args.batches, args.batch_contexts)
    read: dict[int, list[float]] = {}

    def memory(threads: int, _round: int) -> list[Result]:
        read.setdefault(threads, []).append(read_gb_s(threads))
        return []

    contenders: list[Callable[[int, int], Iterable[Result]]] = [
        memory, lambda threads, number: measure(args.model, threads, tests, number),
    ]  # fmt: skip
    if args.peer:
        contenders.append(lambda threads, _: measure_peer(args.peer.resolve(), args.model, threads, tests))
    read_anew(args.model)
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "vllm_cpp": vllm_cpp.__version__}
    results = rounds(contenders, args.threads, args.rounds)
    report = Report(args.model.name, about, results, read, {context: token_bytes(args.model, context) for context in args.contexts})
    print(f"{report.model}, {about['date']}, {about['machine']}, median of {args.rounds}\n")
    print(report.markdown())
    if args.json:
        report.save(args.json)


if __name__ == "__main__":
    main()
