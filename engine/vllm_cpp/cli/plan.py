"""--plan: what a load would do with the weights of a file, for a person or as JSON.

Owns: the words and the columns. Must not decide anything: it prints a `residency.plan.Plan`. A new subject is one more function in
`_SECTIONS`, and its facts go into `_facts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from vllm_cpp.cli import output
from vllm_cpp.cli.arguments import Options
from vllm_cpp.residency.device_fit import gib
from vllm_cpp.residency.plan import Plan

Row = tuple[str, str]


def show(options: Options, document: Any) -> int:
    """Print the plan to standard output. Exit code 1 when the model would be refused."""
    from vllm_cpp import api

    plan = api.plan(str(options.model), offload_config=document, device=options.device)
    if options.json:
        output.write(json.dumps(_facts(plan), ensure_ascii=False) + "\n")
    else:
        rows = [row for section in _SECTIONS for row in section(plan)]
        output.write("".join(f"{label:<13} {text}\n" for label, text in rows) + "\n" + "\n".join(_table(plan)) + "\n")
    return 0 if plan.refusal is None else 1


def _size(n_bytes: int) -> str:
    return f"{n_bytes} bytes ({gib(n_bytes)})"


def _file(plan: Plan) -> Iterator[Row]:
    shards = f" in {plan.num_shards} files" if plan.num_shards > 1 else ""
    yield "file", f"{plan.path}{shards}, {_size(plan.file_bytes)}"
    yield "architecture", f"{plan.inventory.architecture}, {plan.inventory.num_layers} layers"


def _weights(plan: Plan) -> Iterator[Row]:
    yield "dense", _size(plan.dense_bytes)
    if not plan.towers:
        yield "experts", "none"
        return
    yield "experts", f"{len(plan.towers)} towers, {sum(plan.slices.values())} slices, {_size(plan.tower_bytes)}"
    yield "slices", ", ".join(f"{count} of {size} bytes" for size, count in plan.slices.items())
    count, n_bytes = plan.working_set
    yield "a token", f"reads {count} slices, {_size(n_bytes)}, and everything dense"


def _memory(plan: Plan) -> Iterator[Row]:
    known = plan.available_bytes
    yield "memory", "the system does not say what is available" if known is None else f"{_size(known)} available, control group included"
    prefault = {None: "while it fits", True: "on", False: "off"}[plan.residency.prefault]
    lives = f"used in place from the mapping, read in: {prefault}" if plan.residency.mmap else "copied into memory"
    yield "weights", lives


def _device(plan: Plan) -> Iterator[Row]:
    stages = "stages weights" if plan.device.stages_weights else "reads weights where they are"
    yield "device", f"{plan.device.name}, {stages}"
    if plan.device.stages_weights:
        yield "staged", f"{_size(plan.need.total_bytes)} in {plan.need.num_tensors} tensors"
        yield "budget", _size(plan.budget) if plan.budget else "no limit is known"
        yield "slot lane", "on" if plan.lane.serves else f"off: {plan.lane.missing}"
    for line in plan.placement.lines or ("no placement is asked for",):
        yield "placement", line.removeprefix("engine: device placement").removeprefix(": ").strip()
    if plan.refusal is not None:
        yield "REFUSED", plan.refusal


_SECTIONS: Final[tuple[Callable[[Plan], Iterator[Row]], ...]] = (_file, _weights, _memory, _device)


def _table(plan: Plan) -> Iterator[str]:
    yield f"{'layer':>6}  {'what':<8} {'bytes':>16}  {'lives in':<14} computed on"
    for place in plan.places:
        layer = "-" if place.layer is None else str(place.layer)
        yield f"{layer:>6}  {place.what:<8} {place.n_bytes:>16}  {place.lives:<14} {place.computed_on}"


def _facts(plan: Plan) -> dict[str, Any]:
    slices, slice_bytes = plan.working_set
    return {
        "file": plan.path,
        "files": plan.num_shards,
        "file_bytes": plan.file_bytes,
        "architecture": plan.inventory.architecture,
        "layers": plan.inventory.num_layers,
        "dense_bytes": plan.dense_bytes,
        "towers": len(plan.towers),
        "tower_bytes": plan.tower_bytes,
        "slices": {str(size): count for size, count in plan.slices.items()},
        "token_slices": slices,
        "token_slice_bytes": slice_bytes,
        "available_bytes": plan.available_bytes,
        "mmap": plan.residency.mmap,
        "device": plan.device.name,
        "budget_bytes": plan.budget,
        "staged_bytes": plan.need.total_bytes if plan.device.stages_weights else 0,
        "placed_layers": list(plan.placement.on_cpu),
        "refusal": plan.refusal,
        "places": [
            {"layer": one.layer, "what": one.what, "bytes": one.n_bytes, "lives": one.lives, "computed_on": one.computed_on}
            for one in plan.places
        ],
    }
