"""Opens broken files, one after another, in a process that may die of it.

Reads a seed file and a list of edits (JSON, from stdin): for each, the seed is cut to a length, patched, opened, and everything in it that
the engine would look at is looked at. Prints one line each: "ok", "refused <text>", or "wrong <what>". The parent sets the limits on
memory and time; a line that never comes tells it which file did the damage.

An "ok" is held against the gguf package's reader: what both accept must be the same tensors and values.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path

import gguf
import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import GGUFModel, open_model
from vllm_cpp.gguf_file.hparams import read_hyper_parameters
from vllm_cpp.quants import ENCODINGS

EXTRA_BYTES = 256 << 20
# Encodings that gguf's reader knows, with the size ggml gives them.
SIZES = {row.name: (row.block_values, row.block_bytes) for row in ENCODINGS.values()}
COMPARABLE = {kind.name for kind, size in gguf.GGML_QUANT_SIZES.items() if size == SIZES[kind.name]}


def limit_memory() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + EXTRA_BYTES, now + EXTRA_BYTES))


def look(model: GGUFModel) -> None:
    """Everything a load would do, short of computing."""
    for key in model.kv:
        model.kv[key]
    for name, info in model.tensors.items():
        data = model.bytes_of(name)
        if len(data) != info.n_bytes or not info.n_bytes:
            raise AssertionError(f"tensor {name} has {len(data)} bytes of {info.n_bytes}")
        int(data[0]), int(data[-1])
        model.need(name, info.shape)
    read_hyper_parameters(model)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return np.array_equal(a, np.array(b, a.dtype), equal_nan=a.dtype.kind == "f")
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def differs(path: Path, model: GGUFModel) -> str | None:
    """How the gguf package's reader sees the file otherwise, or None."""
    reader = gguf.GGUFReader(path)
    fields = {key: f for key, f in reader.fields.items() if not key.startswith("GGUF.")}
    if list(fields) != list(model.kv):
        return "keys"
    for key, f in fields.items():
        if not same(model.kv[key], f.contents()):
            return f"key {key}: {model.kv[key]!r}, {f.contents()!r}"
    ours = [(t.name, t.shape, t.encoding.ggml_id, t.n_bytes, t.file_offset) for t in model.tensors.values()]
    theirs = [(t.name, tuple(reversed(t.shape.tolist())), t.tensor_type.value, t.n_bytes, t.data_offset) for t in reader.tensors]
    return None if ours == theirs else "tensors"


def verdict(path: Path) -> str:
    try:
        with open_model(path) as model:
            comparable = all(t.encoding.name in COMPARABLE for t in model.tensors.values())
            other = differs(path, model) if comparable else None
            if other:
                return f"wrong: the gguf package reads something else: {other}"
            look(model)
    except ModelLoadError as error:
        return f"refused {error}"
    except BaseException as error:  # noqa: BLE001 (the very thing this looks for)
        return f"wrong: {type(error).__name__}: {error}"
    return "ok"


def main() -> None:
    job = json.load(sys.stdin)
    seed = Path(job["seed"]).read_bytes()
    path = Path(job["seed"]).with_name("broken.gguf")
    limit_memory()
    for length, patches in job["edits"]:
        blob = bytearray(seed)
        for at, patch in patches:
            blob[at : at + len(patch) // 2] = bytes.fromhex(patch)
        path.write_bytes(blob[:length])
        print(json.dumps(verdict(path)), flush=True)


main()
