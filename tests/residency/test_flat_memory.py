"""Streaming takes no more memory the longer it runs: over many steps, and over many engines one after the other."""

from __future__ import annotations

import os
import subprocess
import sys

LIMIT_KIB = 1024

# A process of its own, so that nothing but this is measured. The first rounds bring in what stays: pages of the arena, of the KV cache and
# of compiled code, the allocator's pools.
PROGRAM = """
import gc, itertools, sys, vllm_cpp

WORDS = " ".join(map("".join, itertools.product("ab", repeat=9)))

def used_kib():
    gc.collect()
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Anonymous:",)))

def run(tokens):
    with vllm_cpp.load(sys.argv[1], threads=2, max_num_seqs=2, max_model_len=288) as llm:
        for _ in range(tokens // 250):
            before = used_kib()
            llm.generate([1, 2, 3], max_tokens=250, temperature=0, ignore_eos=True)
            print("steps", used_kib() - before)
        if not tokens:
            llm.tokenize(WORDS)
            llm.generate("a b c", max_tokens=2, temperature=0, ignore_eos=True)

run(750)
for cycle in range(60):
    if cycle == 10:
        before = used_kib()
    run(0)
print("cycles", used_kib() - before)
"""


def test_500_steps_and_50_engines_leave_memory_as_it_was(tiny_model) -> None:
    environment = {**os.environ, "VT_MOE_EXPERT_STREAM": "1", "VT_MOE_EXPERT_STREAM_SLOTS": "20", "VT_MOE_EXPERT_STREAM_STATS_EVERY": "0"}
    command = [sys.executable, "-c", PROGRAM, str(tiny_model("qwen2moe-s15-z0-mix"))]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown = [(line.split()[0], int(line.split()[1])) for line in ran.stdout.splitlines()]
    assert [what for what, _ in grown] == ["steps", "steps", "steps", "cycles"]
    warm, *flat = (kib for _, kib in grown)
    assert sum(flat[:2]) < LIMIT_KIB, f"500 steps took {sum(flat[:2])} KiB, after {warm} KiB of the first 250"
    assert flat[2] < LIMIT_KIB, f"50 engines left {flat[2]} KiB behind"
    assert "[expert-stream] steps=" in ran.stderr
