"""Loads a model file that is broken in one way after another, in a process that may die of it.

Reads the path and the edits (JSON, from stdin): for each edit the places of u32 numbers in the file and what to write there. The sound file
is loaded first, before memory is limited to little more than that took. Each state of the file is planned and loaded by the public
functions. Prints one line each: "ok", "refused <text>", or "wrong <what>". A line that never comes tells the parent which edit did the
damage.
"""

from __future__ import annotations

import json
import resource
import struct
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
    job = json.load(sys.stdin)
    path, sound = job["path"], Path(job["path"]).read_bytes()[: job["keys_end"]]
    print(json.dumps(verdict(path)), flush=True)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + EXTRA_BYTES, now + EXTRA_BYTES))
    for edit in job["edits"]:
        with Path(path).open("r+b") as file:
            for at, number in edit:
                file.seek(at)
                file.write(struct.pack("<I", number))
        print(json.dumps(verdict(path)), flush=True)
        with Path(path).open("r+b") as file:
            for at, _ in edit:
                file.seek(at)
                file.write(sound[at : at + 4])


main()
