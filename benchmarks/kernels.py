"""Speed of every encoding's kernels on one thread, beside the machine's read bandwidth and ggml's kernels on the same bytes.

Owns the measurement of kernels by themselves; `decode.py` measures whole steps. Rows: GB/s of weight bytes read from memory (a buffer
larger than the caches), as decoding one token does. Tile: GFLOP/s of a product with several activation rows. The contenders take turns;
medians are compared.

    python -m benchmarks.kernels --peer path/to/folder/of/libggml-cpu.so --json out.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.decode import machine
from benchmarks.ggml_kernels import Ggml
from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu.quantize import LAYOUTS, activation_row_bytes, quantize
from vllm_cpp.kernels.cpu.registry import NAMES, tile_scratch_bytes
from vllm_cpp.quants import ENCODINGS

UNKNOWN_TO_GGML = ("F64",)  # it crashes instead of refusing the product
ROWS_BYTES = 256 << 20  # more than any cache holds
TILE_ROWS = 1024


@jit.function(3)
def read_all(address, n_bytes, out):  # type: ignore[no-untyped-def]
    """Load every byte and do next to nothing with it."""
    total = simd.zero(simd.i32x16)
    for at in range(address, address + n_bytes, 256):
        for line in range(at, at + 256, 64):
            total = total + simd.load(simd.i32x16, line)
    simd.store(out, total)


def random_weights(name: str, n_rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of bytes 32 to 39: whatever the layout, the f16 scales in them are finite, normal and close to each other, as a tensor's are."""
    return np.frombuffer(rng.bytes(n_rows * ENCODINGS[name].row_bytes(k)), np.uint8).reshape(n_rows, -1) & 7 | 32


def activations(layout: str, x: np.ndarray) -> np.ndarray:
    if layout == "f32":
        return x
    out = aligned_zeros((len(x), activation_row_bytes(layout, x.shape[1])), np.uint8)
    count = np.array([len(x)], np.int64)
    fields = [count.ctypes.data, x.ctypes.data, x.strides[0], x.shape[1], out.ctypes.data, out.strides[0], LAYOUTS.index(layout)]
    record = np.array(fields, np.int64)
    quantize(record.ctypes.data, 0, 1)
    return out


def seconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each call, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def measure_rows(name: str, k: int, peer: Ggml | None, rounds: int) -> dict[str, float]:
    """GB/s of ours, of the peer and of plain reading."""
    rng = np.random.default_rng(0)
    encoding = ENCODINGS[name]
    kernels = importlib.import_module(f"vllm_cpp.kernels.cpu.encodings.{name.lower()}")
    some = random_weights(name, 256, k, rng)
    copies = -(-ROWS_BYTES // some.nbytes)
    w = aligned_zeros((256 * copies, some.shape[1]), np.uint8)
    w.reshape(copies, -1)[:] = some.reshape(-1)
    x = rng.standard_normal((1, k)).astype(np.float32)
    act, out = activations(encoding.activation, x), aligned_zeros(len(w), np.float32)
    arguments = (w.ctypes.data, w.shape[1], len(w), k, act.ctypes.data, out.ctypes.data)
    readable = w.nbytes // 256 * 256
    calls = {"read": lambda: read_all(w.ctypes.data, readable, out.ctypes.data), "ours": lambda: kernels.rows(*arguments)}
    if peer and name not in UNKNOWN_TO_GGML:
        calls["ggml"] = peer.rows(encoding.ggml_id, *arguments[:4], x[0], out.ctypes.data)
    return {contender: w.nbytes / spent / 1e9 for contender, spent in seconds(calls, rounds).items()}


def measure_tile(name: str, k: int, n_acts: int, peer: Ggml | None, rounds: int) -> dict[str, float]:
    """GFLOP/s of ours and of the peer; the peer's time includes quantizing the activations, ours does not (about a hundredth)."""
    rng = np.random.default_rng(0)
    encoding = ENCODINGS[name]
    kernels = importlib.import_module(f"vllm_cpp.kernels.cpu.encodings.{name.lower()}")
    w = random_weights(name, TILE_ROWS, k, rng)
    x = rng.standard_normal((n_acts, k)).astype(np.float32)
    acts, out = activations(encoding.activation, x), aligned_zeros((n_acts, TILE_ROWS), np.float32)
    tables = [np.array([row.ctypes.data for row in rows], np.int64) for rows in (acts, out)]
    scratch = aligned_zeros(tile_scratch_bytes(k), np.uint8)
    arguments = (w.ctypes.data, w.shape[1], TILE_ROWS, k, tables[0].ctypes.data, n_acts, tables[1].ctypes.data, scratch.ctypes.data)
    calls: dict[str, Callable[[], Any]] = {"ours": lambda: kernels.tile(*arguments)}
    if peer and name not in UNKNOWN_TO_GGML:
        calls["ggml"] = peer.product(encoding.ggml_id, w, k, x)
    return {contender: 2 * TILE_ROWS * k * n_acts / spent / 1e9 for contender, spent in seconds(calls, rounds).items()}


def table(results: list[dict[str, Any]], n_acts: list[int]) -> str:
    """Markdown: rows in GB/s and share of reading, tiles in GFLOP/s, each with its ratio to ggml where that was measured."""
    lines = ["| encoding | rows GB/s | of reading | ratio | " + " | ".join(f"tile of {n}, GFLOP/s | ratio" for n in n_acts) + " |"]
    lines.append("|---|---|---|---|" + "---|---|" * len(n_acts))
    for result in results:
        rows = result["rows"]
        cells = [f"{rows['ours']:.1f}", f"{rows['ours'] / rows['read']:.2f}", ratio(rows)]
        for n in n_acts:
            cells += [f"{result['tiles'][n]['ours']:.0f}", ratio(result["tiles"][n])]
        lines.append(f"| {result['encoding']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratio(rates: dict[str, float]) -> str:
    return f"**{rates['ours'] / rates['ggml']:.2f}**" if "ggml" in rates else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the encoding kernels on one thread.")
    parser.add_argument("--encodings", default=",".join(NAMES))
    parser.add_argument("--k", type=int, default=2048, help="values of a weight row (default: 2048)")
    parser.add_argument("--acts", default="4,32,256", help="numbers of activation rows of the tiles (default: 4,32,256)")
    parser.add_argument("--peer", type=Path, help="a folder with libggml-base.so and libggml-cpu.so")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()

    peer = Ggml(args.peer) if args.peer else None
    n_acts = [int(n) for n in args.acts.split(",")]
    results = []
    for name in args.encodings.split(","):
        tiles = {n: measure_tile(name, args.k, n, peer, args.rounds) for n in n_acts}
        results.append({"encoding": name, "rows": measure_rows(name, args.k, peer, args.rounds), "tiles": tiles})
        print(".", end="", flush=True)
    print(f"\n\n{time.strftime('%Y-%m-%d')}, {machine()}, lane {simd.lane()}, k = {args.k}, one thread, median of {args.rounds}\n")
    print(table(results, n_acts))
    if args.json:
        args.json.write_text(json.dumps({"k": args.k, "machine": machine(), "lane": simd.lane(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
