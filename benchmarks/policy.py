"""Hit rates of the slot policies on recorded routing, by the store that serves.

Owns the reading of traces and the optimum they are compared with (Belady's: evict what is needed last, which takes knowing the future).
Each visit of a trace goes through the compiled store as a model's would, except that its reads end at once; nothing is computed and no file
is read. Must not know how the store decides.

A trace is a CSV file with a header line and the columns phase (0 prompt, 1 decode), step, layer and expert, as BigMoeOnEdge publishes them;
lines that begin with # are remarks. The prompt is one visit a layer and warms the store up; hit rates are those of decoding.

    python -m benchmarks.policy trace.csv another.csv --check
    python -m benchmarks.policy trace.csv another.csv --shares        (what residency/forecast.py has recorded)
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_cpp.gguf_file.mapped import Identity
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu import slots as kernel
from vllm_cpp.residency.slots import SlotStore, TowerSource
from vllm_cpp.residency.visits import Visit

POOLS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
SHARES = (1 / 128, 1 / 64, 3 / 128, 1 / 32, 3 / 64, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)
TOWERS = 3  # gate, up, down: an expert is three slices
SLICE_BYTES = 64
LOSS_ALLOWED = 0.5  # points below LRU that NEXT may fall on any trace and pool


@dataclass(frozen=True, slots=True)
class Step:
    """One layer's visit: how often each expert was chosen, by how many tokens."""

    decode: bool
    layer: int
    chosen: dict[int, int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded run. `cycle` is what one decoded token uses of all layers together, in experts."""

    name: str
    num_layers: int
    num_experts: int
    cycle: float
    steps: list[Step]


def read_trace(path: Path) -> Trace:
    """Layers are numbered anew in their order, so that dense layers between them do not count."""
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    if not rows or not {"phase", "step", "layer", "expert"} <= set(rows[0]):
        raise ValueError(f"{path}: expected a CSV file with the columns phase, step, layer, expert, and at least one row")
    layers = {layer: number for number, layer in enumerate(sorted({int(row["layer"]) for row in rows}))}
    visits: dict[tuple[bool, int, int], dict[int, int]] = {}
    prompt_steps = set()
    for row in rows:
        decode, step = row["phase"] == "1", int(row["step"])
        if not decode:
            prompt_steps.add(step)
        chosen = visits.setdefault((decode, step if decode else 0, layers[int(row["layer"])]), {})
        chosen[int(row["expert"])] = chosen.get(int(row["expert"]), 0) + 1
    steps = [Step(key[0], key[2], chosen, 1 if key[0] else len(prompt_steps)) for key, chosen in sorted(visits.items())]
    decoded = [len(step.chosen) for step in steps if step.decode]
    tokens = len({key[1] for key in visits if key[0]})
    return Trace(path.stem, len(layers), 1 + max(int(row["expert"]) for row in rows), sum(decoded) / tokens, steps)


def replay(trace: Trace, num_slots: int, policy: str) -> float:
    """Hit rate of the store."""
    store = SlotStore(num_slots, SLICE_BYTES, policy)
    with Path("/dev/null").open("rb") as nothing:
        source = [
            [
                TowerSource(f"{il}.{t}", "", nothing.fileno(), Identity(0, 0, 0, 0), TOWERS * il + t, SLICE_BYTES, trace.num_experts)
                for t in range(TOWERS)
            ]
            for il in range(trace.num_layers)
        ]
        model = store.open_model(source, direct=False)
    offsets, counts = aligned_zeros(trace.num_experts + 1, np.int32), aligned_zeros(2, np.int64)
    visit = Visit(store, trace.num_experts)
    where = {"offsets": offsets.ctypes.data, "tokens": counts.ctypes.data, "seqs": counts.ctypes.data + 8, "mapped": [0] * TOWERS}
    askings = [visit.asking(layer, **where) for layer in model.layers]
    counts[1] = 1
    warm = None
    for step in trace.steps:
        if step.decode and warm is None:
            warm = store.counters.as_dict()
        np.cumsum([step.chosen.get(e, 0) for e in range(trace.num_experts)], out=offsets[1:])
        counts[0] = step.tokens
        kernel.acquire_slices(askings[step.layer].record.ctypes.data, 0, 1)
        while True:
            kernel.acquire_more(askings[step.layer].record.ctypes.data, 0, 1)
            store.records[store.records[:, kernel.SLOT_STATE] == kernel.FILLING, kernel.SLOT_STATE] = kernel.READY
            if not visit.again:
                break
    after, warm = store.counters.as_dict(), warm or {}
    hits, misses = after["hits"] - warm["hits"], after["misses"] - warm["misses"]
    visit.close()
    store.close_model(model)
    return hits / (hits + misses)


def belady(trace: Trace, num_slots: int) -> float:
    """The best hit rate there is, with whole experts as units, what a visit uses protected during it."""
    room = num_slots // TOWERS
    uses: dict[tuple[int, int], Iterator[int]] = {}
    for number, step in enumerate(trace.steps):
        for e in step.chosen:
            uses.setdefault((step.layer, e), []).append(number)
    following = {key: iter([*numbers[1:], len(trace.steps)]) for key, numbers in uses.items()}
    held: dict[tuple[int, int], int] = {}
    hits = asked = 0
    for step in trace.steps:
        here = [(step.layer, e) for e in step.chosen]
        if step.decode:
            asked += len(here)
            hits += sum(key in held for key in here)
        held.update((key, next(following[key])) for key in here)
        for key in sorted(held.keys() - set(here), key=held.__getitem__, reverse=True)[: max(0, len(held) - room)]:
            del held[key]
        for key in here[: max(0, len(held) - room)]:  # a pool below one visit
            del held[key]
    return hits / asked


def measure(trace: Trace, policies: list[str]) -> list[dict[str, float]]:
    """A row a pool: its size in token cycles and slots, and each policy's hit rate in percent."""
    rows = []
    for pool in POOLS:
        num_slots = int(trace.cycle * pool) * TOWERS
        row = {"pool": pool, "slots": num_slots}
        row |= {policy: round(100 * replay(trace, num_slots, policy), 1) for policy in policies}
        rows.append({**row, "belady": round(100 * belady(trace, num_slots), 1)})
    return rows


def by_share(trace: Trace) -> list[tuple[float, float]]:
    """(share of all slices that slots hold, hit rate of the default policy in percent): what `vllm-cli --plan` counts on."""
    total = trace.num_layers * trace.num_experts * TOWERS
    return [(share, round(100 * replay(trace, int(share * total), "next"), 1)) for share in SHARES]


def table(trace: Trace, rows: list[dict[str, float]]) -> str:
    """Markdown."""
    names = [name for name in rows[0] if name not in ("pool", "slots")]
    head = f"{trace.name}: {trace.num_layers} layers, {trace.num_experts} experts, {trace.cycle:.0f} a token; hit rate in %, decoding\n"
    lines = [head, "| pool | slots | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    lines += [f"| x{row['pool']:g} | {row['slots']:g} | " + " | ".join(f"{row[name]:.1f}" for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def below(trace: Trace, rows: list[dict[str, float]]) -> list[str]:
    """Where the default policy is worse than it may be."""
    floors = BARS.get(trace.name, {})
    found = []
    for row in rows:
        floor = max(row["lru"] - LOSS_ALLOWED, floors.get(row["pool"], 0.1))
        if row["next"] < floor:
            found.append(f"{trace.name} x{row['pool']:g}: next hits {row['next']:.1f} %, expected at least {floor:.1f} %")
    return found


# What the project asks of its default on the public traces of Qwen3-30B-A3B and gpt-oss-120b (top-6 and top-2 of 128 experts).
BARS = {
    "qwen": dict(zip(POOLS[1:], (37, 46, 54, 66, 75), strict=True)),
    "gptoss": dict(zip(POOLS[1:], (22, 30, 36, 44, 50), strict=True)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Hit rates of the slot policies on recorded routing.")
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--policies", default="lru,decay,next", help="of lru, decay and next (default: all)")
    parser.add_argument("--check", action="store_true", help="end with status 1 where the default policy is worse than it may be")
    parser.add_argument("--shares", action="store_true", help="hit rates by the share of all slices that slots hold, and nothing else")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    document, complaints = {}, []
    for path in args.traces:
        trace = read_trace(path)
        if args.shares:
            print(trace.name, *(f"{share:.4f}:{hits:.1f}" for share, hits in by_share(trace)))
            continue
        rows = document[trace.name] = measure(trace, args.policies.split(","))
        print(table(trace, rows))
        complaints += below(trace, rows) if args.check else []
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
