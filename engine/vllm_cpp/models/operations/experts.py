"""Routed experts as operations: the router's choice, the chosen experts' products, and the slices they are streamed through.

Owns the order of what is asked for, computed and combined. Must not know architectures, nor where a slice lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_cpp.kernels.cpu import moe, router, slots
from vllm_cpp.kernels.cpu.registry import tile_scratch_bytes
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Address, Builder, Rows, Weight


@dataclass(frozen=True, slots=True)
class Streamed:
    """A layer's streaming: the operation to go back to for another wave (0: the layer is not streamed), its towers' tables of places by
    name, and the fields of its work list."""

    first: int
    places: dict[str, Address]
    wave: dict[str, Address]


@dataclass(frozen=True, slots=True)
class Routes:
    """What the router chose this step: `pairs` counts (token, slot) pairs; `order` holds them sorted by expert, cut at `offsets`."""

    n_experts: int
    top_k: int
    pairs: Address
    weights: np.ndarray
    offsets: np.ndarray
    order: np.ndarray


def route(b: Builder, logits: Rows, top_k: int, *, scores: int, bias: Address, normalize: bool, scale: float) -> Routes:
    """Choose top_k experts for every row of router logits and sort the pairs by expert."""
    n_experts, max_rows = logits.width, len(logits.array)
    factor_source = next(c.source for c in b.counts if c.address == logits.count)
    pairs = b.count(factor_source, top_k)
    ids, weights = (
        b.shared("router ids", (max_rows, top_k), np.int32),
        b.shared("router weights", (max_rows, top_k), np.float32),
    )
    offsets, order = b.shared("expert offsets", n_experts + 1, np.int32), b.shared("expert pairs", max_rows * top_k, np.int32)
    record = pack(
        router.ROUTER_FIELDS, count=logits.count, logits=logits.address, logits_stride=logits.stride, n_experts=n_experts,
        top_k=top_k, scores=scores,
        bias=bias, normalize=normalize, scale=float(scale), ids=ids.ctypes.data, weights=weights.ctypes.data, scratch=0,
        scratch_stride=0,
    )  # fmt: skip
    b.wants_scratch(record, router.ROUTER_FIELDS, router.scratch_bytes(n_experts))
    b.program.add(router.route, record, f"choose {top_k} of {n_experts} experts")
    record = pack(
        router.GROUP_FIELDS, count=pairs, ids=ids.ctypes.data, n_experts=n_experts, offsets=offsets.ctypes.data,
        pairs=order.ctypes.data,
    )  # fmt: skip
    b.program.add(router.group_by_expert, record, "sort the pairs by expert")
    return Routes(n_experts, top_k, pairs, weights, offsets, order)


def experts(
    b: Builder, routes: Routes, h: Rows, gate: Weight, up: Weight, down: Weight, x: Rows, meanwhile: Callable[[], None] | None = None
) -> None:
    """x += weighted sum of the chosen experts' down(silu(gate · h) * (up · h)). `meanwhile` adds operations that need not wait for
    them: they are computed while slices are read."""
    streamed = _streamed(b, routes, h, gate, up, down, meanwhile or (lambda: None))
    b.activations(h, [gate, up])
    act, act_stride = b.activation(h, gate.layout)
    up_act, up_act_stride = b.activation(h, up.layout)
    hidden = b.rows("expert hidden", gate.n_rows, routes.pairs, routes.top_k)
    up_out = b.rows("expert up", up.n_rows, routes.pairs, routes.top_k)
    y = b.rows("expert out", down.n_rows, routes.pairs, routes.top_k)
    max_pairs = len(hidden.array)
    shared = {"n_experts": routes.n_experts, "offsets": routes.offsets.ctypes.data, "pairs": routes.order.ctypes.data, "scratch": 0,
              "scratch_stride": 0, "max_count": max_pairs, **streamed.wave}  # fmt: skip
    gate_tower, up_tower, down_tower = (_tower(b, tower, streamed) for tower in (gate, up, down))
    if b.advises and not streamed.first:
        record = pack(
            moe.ADVISE_FIELDS, offsets=routes.offsets.ctypes.data, n_experts=routes.n_experts, n_towers=3, tower0=gate_tower,
            tower1=up_tower, tower2=down_tower,
        )  # fmt: skip
        b.program.add(moe.advise, record, f"ask for the chosen slices of {gate.name}, {up.name}, {down.name}", barrier=False)
    record = pack(
        moe.UP_FIELDS, **shared, top_k=routes.top_k, act=act, act_stride=act_stride, up_act=up_act, up_act_stride=up_act_stride,
        gate_tower=gate_tower, gate_stride=gate.row_bytes, gate_rows_fn=gate.kernels.rows_address,
        gate_tile_fn=gate.kernels.tile_address, gate_scale=_expert_scale(b, gate, routes.n_experts),
        up_tower=up_tower, up_stride=up.row_bytes, up_rows_fn=up.kernels.rows_address,
        up_tile_fn=up.kernels.tile_address, up_scale=_expert_scale(b, up, routes.n_experts),
        k=gate.k, n_rows=gate.n_rows, gate_out=hidden.address, up_out=up_out.address, out_stride=hidden.stride,
    )  # fmt: skip
    b.wants_scratch(record, moe.UP_FIELDS, moe.scratch_bytes(max_pairs, tile_scratch_bytes(gate.k)))
    b.program.add(
        moe.experts_up_streamed if streamed.first else moe.experts_up,
        record,
        f"{hidden.name} = silu({gate.name} · {h.name}) * ({up.name} · {h.name}) ({gate.encoding}, {up.encoding})",
    )
    act, act_stride = b.activation(hidden, down.layout)
    record = pack(
        moe.DOWN_FIELDS, **shared, act=act, act_stride=act_stride, tower=down_tower, stride=down.row_bytes,
        rows_fn=down.kernels.rows_address, tile_fn=down.kernels.tile_address, scale=_expert_scale(b, down, routes.n_experts),
        k=down.k, n_rows=down.n_rows, out=y.address, out_stride=y.stride,
    )  # fmt: skip
    b.wants_scratch(record, moe.DOWN_FIELDS, moe.scratch_bytes(max_pairs, tile_scratch_bytes(down.k)))
    b.program.add(
        moe.experts_down_streamed if streamed.first else moe.experts_down,
        record,
        f"{y.name} = {down.name} ({down.encoding}) · {hidden.name}",
    )
    if streamed.first:
        b.program.repeat_from(streamed.first, b.stream.visit.again_at)
    record = pack(
        moe.COMBINE_FIELDS, count=x.count, top_k=routes.top_k, width=x.width, weights=routes.weights.ctypes.data, y=y.address,
        y_stride=y.stride,
        x=x.address, x_stride=x.stride,
    )  # fmt: skip
    b.program.add(moe.combine, record, f"{x.name} += weighted {y.name}")
    x.quantized.clear()


def _streamed(b: Builder, routes: Routes, h: Rows, gate: Weight, up: Weight, down: Weight, meanwhile: Callable[[], None]) -> Streamed:
    """Add the operations that acquire the layer's slices, if they are streamed, and `meanwhile` behind the first of them."""
    by_tokens = next(c.source for c in b.counts if c.address == h.count) == "tokens"
    asked = b.stream and b.stream.asking(
        (gate.name, up.name, down.name), offsets=routes.offsets.ctypes.data, tokens=h.count,
        seqs=b.count("seqs") if by_tokens else h.count, top_k=routes.top_k,
    )  # fmt: skip
    if not asked:
        meanwhile()
        return Streamed(0, {}, dict.fromkeys(moe.WAVE_FIELDS, 0))
    asking, places = asked
    # Thread 0 looks up and posts reads, which touches nothing that the operations up to the next barrier read or write.
    b.program.add(slots.acquire_slices, asking.record, f"slots of {gate.name}, {up.name}, {down.name}", barrier=False)
    meanwhile()
    first = len(b.program.operations)
    meets = all(layout == "f32" or layout in h.quantized for layout in (gate.layout, up.layout))
    b.program.add(slots.acquire_more, asking.record, "the next of them, in later waves", barrier=meets)
    waiting = b.shared("experts waited for", (b.num_threads, -(-routes.n_experts // 16) * 16), np.int32)
    visit = b.stream.visit
    wave = {
        "wave": visit.wave.ctypes.data,
        "n_wave": visit.n_wave_at,
        "waiting": waiting.ctypes.data,
        "waiting_stride": waiting.strides[0],
        "ended": visit.store.ended_at,
    }
    return Streamed(first, places, wave)


def _tower(b: Builder, tower: Weight, streamed: Streamed) -> Address:
    record = pack(moe.TOWER_FIELDS, base=tower.address, slice_bytes=tower.slice_bytes, places=streamed.places.get(tower.name, 0))
    b.keep.append(record)
    return record.ctypes.data


def _expert_scale(b: Builder, tower: Weight, n_experts: int) -> Address:
    """Address of the tower's second scale, one f32 an expert, or 0 (see FAMILIES: NVFP4 files have them)."""
    return b.maybe_vector(tower.name.removesuffix(".weight") + ".scale", n_experts)
