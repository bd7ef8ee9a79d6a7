"""--plan: what a load would do with the weights of a file, for a person or as JSON.

Owns: the words and the columns. Must not decide anything: it prints a `residency.plan.Plan`. A new subject is one more function in
`_SECTIONS`, and its facts go into `facts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

from vllm_cpp.cli import output
from vllm_cpp.cli.arguments import Options
from vllm_cpp.residency.device_fit import gib
from vllm_cpp.residency.forecast import Expectation, Forecast
from vllm_cpp.residency.plan import Plan

Row = tuple[str, str]


def show(options: Options, document: Any, parameters: dict[str, Any]) -> int:
    """Print the plan to standard output. Exit code 1 when the model would be refused. `parameters` are the engine's."""
    from vllm_cpp import api

    plan = api.plan(str(options.model), offload_config=document, measure=True, **parameters)
    if options.json:
        output.write(json.dumps(facts(plan), ensure_ascii=False) + "\n")
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
    limit = plan.limit_bytes
    yield "limit", "no control group limits it" if limit is None else f"{_size(limit)}, of this process's control group"
    prefault = {None: "while it fits", True: "on", False: "off"}[plan.residency.prefault]
    lives = f"used in place from the mapping, read in: {prefault}" if plan.residency.mmap else "copied into memory"
    yield "weights", lives


def _streaming(plan: Plan) -> Iterator[Row]:
    forecast = plan.forecast
    if forecast is None:
        return
    yield "streaming", _whether(plan, forecast)
    states = f", {_size(forecast.state_bytes)} of what running sequences keep beside it" if forecast.state_bytes else ""
    kept = f"{_size(forecast.kv_bytes)} of KV cache{states} and {_size(forecast.spare_bytes)} to spare"
    if forecast.proposed is None:
        yield "slots", f"none fit: {_size(forecast.room_bytes)} are left beside everything dense, {kept}"
    else:
        yield "slots", f"{_arena(forecast.proposed)}; they fit beside everything dense, {kept}"
    if forecast.asked is not None:
        yield "asked", _arena(forecast.asked)
    if forecast.drive is None:
        yield "drive", "not measured: this file system has no reads past the page cache"
    else:
        drive = forecast.drive
        yield "drive", f"{_gb(drive.bytes_per_s)}: random slices past the page cache by {drive.lanes} lanes, for {drive.seconds:.2f} s"
    if forecast.memory is None:
        yield "bandwidth", "not measured: no room for it"
    else:
        fast = forecast.memory
        yield "bandwidth", f"{_gb(fast.bytes_per_s)}: memory read by {fast.threads} threads, for {fast.seconds:.2f} s"
    for whose, expected in (("", forecast.proposed), ("asked ", forecast.asked)):
        if expected is not None:
            yield f"{whose}hits", _hits(expected)
            yield from ((f"{whose}speed", text) for text in _speed(expected))


def _whether(plan: Plan, forecast: Forecast) -> str:
    if plan.unstreamed:
        return f"asked for, but nothing is streamed: {plan.unstreamed}"
    if forecast.fits:
        gain = "the file fits in memory, and borrowing serves it as fast"
        return f"on; {gain}" if plan.streamed else f"off, and not needed: {gain}"
    if plan.streamed:
        return "on"
    if forecast.fits is None:
        return "off; whether the file fits in memory is not known: if it does not, turn it on with --expert-stream SLOTS"
    return "off; the file does not fit in memory: turn it on with --expert-stream SLOTS"


def _arena(expected: Expectation) -> str:
    return (
        f"{expected.slots}, an arena of {_size(expected.arena_bytes)}: {_percent(expected.share)} of all slices, "
        f"{expected.tokens:.1f} times what a token reads"
    )


def _hits(expected: Expectation) -> str:
    return (
        f"{_percent(expected.hit_rate)} expected, as recorded routing of Qwen3-30B-A3B and gpt-oss-120b hits with this share in slots; "
        f"{_percent(expected.even_hit_rate)} if every expert were as likely as any other"
    )


def _speed(expected: Expectation) -> Iterator[str]:
    if expected.compute_s is not None and expected.read_s is not None:
        yield (
            f"{expected.tokens_per_s:.1f} tokens/s expected: {1e3 * expected.compute_s:.1f} ms of memory and "
            f"{1e3 * expected.read_s:.1f} ms of the drive for each; {expected.bound_tokens_per_s:.1f} if the two overlapped wholly, "
            f"{expected.even_tokens_per_s:.1f} with the lower hits"
        )


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


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


_SECTIONS: Final[tuple[Callable[[Plan], Iterator[Row]], ...]] = (_file, _weights, _memory, _streaming, _device)


def _table(plan: Plan) -> Iterator[str]:
    yield f"{'layer':>6}  {'what':<8} {'bytes':>16}  {'lives in':<14} computed on"
    for place in plan.places:
        layer = "-" if place.layer is None else str(place.layer)
        yield f"{layer:>6}  {place.what:<8} {place.n_bytes:>16}  {place.lives:<14} {place.computed_on}"


def facts(plan: Plan) -> dict[str, Any]:
    """The object of --json."""
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
        "limit_bytes": plan.limit_bytes,
        "streaming": _forecast_facts(plan),
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


def _forecast_facts(plan: Plan) -> dict[str, Any] | None:
    """None without routed experts. Rates are parts of the slices asked for, speeds bytes per second."""
    forecast = plan.forecast
    if forecast is None:
        return None
    return {
        "on": bool(plan.streamed),
        "why_not": plan.unstreamed or None,
        "fits_in_memory": forecast.fits,
        "kv_cache_bytes": forecast.kv_bytes,
        "state_bytes": forecast.state_bytes,
        "spare_bytes": forecast.spare_bytes,
        "room_bytes": forecast.room_bytes,
        "drive_bytes_per_s": None if forecast.drive is None else forecast.drive.bytes_per_s,
        "memory_bytes_per_s": None if forecast.memory is None else forecast.memory.bytes_per_s,
        "measuring_s": forecast.measuring_s,
        "proposed": _expectation_facts(forecast.proposed),
        "asked": _expectation_facts(forecast.asked),
    }


def _expectation_facts(expected: Expectation | None) -> dict[str, Any] | None:
    if expected is None:
        return None
    rates = ("tokens_per_s", "even_tokens_per_s", "bound_tokens_per_s")
    return {**asdict(expected), **{name: getattr(expected, name) for name in rates}}
