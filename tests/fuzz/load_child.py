"""Loads broken model files, one after another, in a process that may die of it.

Reads a list of paths (JSON, from stdin); the first is a sound model, loaded before memory is limited to little more than that took. Each is
planned and loaded by the public functions. Prints one line each: "ok", "refused <text>", or "wrong <what>". A line that never comes tells
the parent which file did the damage.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import vllm_cpp
from vllm_cpp import api

EXTRA_BYTES = 64 << 20
SIZES = {"threads": 1, "max_num_seqs": 2, "num_blocks": 8}


def verdict(path: str) -> str:
    said = []
    for step in (lambda: api.plan(path), lambda: vllm_cpp.load(path, **SIZES).close()):
        try:
            step()
        except vllm_cpp.ModelLoadError as error:
            said.append(f"refused {error}")
        except BaseException as error:  # noqa: BLE001 (the very thing this looks for)
            return f"wrong: {type(error).__name__}: {error}"
    return said[-1] if said else "ok"


def main() -> None:
    sound, *broken = json.load(sys.stdin)
    print(json.dumps(verdict(sound)), flush=True)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + EXTRA_BYTES, now + EXTRA_BYTES))
    for path in broken:
        print(json.dumps(verdict(path)), flush=True)


main()
