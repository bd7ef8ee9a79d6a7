"""Routed experts as operations: the router's choice, the chosen experts' products, and the slices they are streamed through.

Owns the order of what is asked for, computed and combined. Must not know architectures, nor where a slice lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.kernels.cpu import moe, router, slots
from vllm_cpp.kernels.cpu.elementwise import SILU_GATED, Activation
from vllm_cpp.kernels.cpu.registry import tile_scratch_bytes
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Address, Builder, Rows, Weight


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix an expert: what a tower's slices hold, or so many rows of each, behind `offset` bytes of others. A second scale f32
    [num_experts] and biases, `bias_stride` bytes between two experts', or 0."""

    weight: Weight
    tower: str
    offset: int
    scale: Address
    bias: Address
    bias_stride: int


@dataclass(frozen=True, slots=True)
class Towers:
    """The experts of a layer: num_experts times gate and up (or up alone) and down."""

    gate: Projection | None
    up: Projection
    down: Projection

    @property
    def names(self) -> list[str]:
        """The tensors these are, in the order of computing; gate and up may be one."""
        parts = (self.gate, self.up, self.down)
        return list(dict.fromkeys(part.tower for part in parts if part))


def towers(b: Builder, il: int, num_experts: int, width: int, n: int, *, gated: bool = True) -> Towers:
    """The towers of layer `il`: experts of `width` hidden units, from rows of n values to rows of n. ModelLoadError names what is missing
    or of another shape."""
    whole = f"blk.{il}.ffn_gate_up_exps"
    down = _projection(b, f"blk.{il}.ffn_down_exps", num_experts, n, width)
    if gated and f"{whole}.weight" in b.model.tensors:
        both = _projection(b, whole, num_experts, 2 * width, n)
        return Towers(_rows_of(both, 0, width, "gate"), _rows_of(both, width, width, "up"), down)
    up = _projection(b, f"blk.{il}.ffn_up_exps", num_experts, width, n)
    return Towers(_projection(b, f"blk.{il}.ffn_gate_exps", num_experts, width, n) if gated else None, up, down)


def _projection(b: Builder, name: str, num_experts: int, num_rows: int, k: int) -> Projection:
    weight = b.tower(f"{name}.weight", num_experts, num_rows, k)
    scale = b.maybe_vector(f"{name}.scale", num_experts)  # NVFP4 files have them
    bias = f"{name}.bias"
    biases = b.table(bias, num_experts, num_rows) if bias in b.model.tensors else 0
    return Projection(weight, weight.name, 0, scale, biases, 4 * num_rows)


def _rows_of(whole: Projection, first: int, n: int, part: str) -> Projection:
    """Rows first ... first + n - 1 of every slice."""
    weight = whole.weight.rows(first, n, f"{whole.tower}[{part}]")
    bias = whole.bias and whole.bias + 4 * first
    return Projection(weight, whole.tower, first * weight.row_bytes, whole.scale, bias, whole.bias_stride)


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

    num_experts: int
    top_k: int
    pairs: Address
    weights: np.ndarray
    offsets: np.ndarray
    order: np.ndarray


def route(
    b: Builder, logits: Rows, top_k: int, *, scores: int, bias: Address = 0, normalize: bool, scale: float = 1.0, groups: int = 1,
    groups_used: int = 1, table: Address = 0,
) -> Routes:  # fmt: skip
    """Choose top_k experts for every row of router logits and sort the pairs by expert. `scores`: a kind of router.py; `bias`:
    f32[num_experts], steers the choice only; `groups`: equal runs of experts of which the `groups_used` best ones are chosen from; `table`:
    what is chosen by the row's token instead (see `experts_by_token`)."""
    num_experts, max_rows = logits.width, len(logits.array)
    factor_source = next(c.source for c in b.counts if c.address == logits.count)
    pairs = b.count(factor_source, top_k)
    ids, weights = (
        b.shared("router ids", (max_rows, top_k), np.int32),
        b.shared("router weights", (max_rows, top_k), np.float32),
    )
    offsets, order = b.shared("expert offsets", num_experts + 1, np.int32), b.shared("expert pairs", max_rows * top_k, np.int32)
    record = pack(
        router.ROUTER_FIELDS, count=logits.count, logits=logits.address, logits_stride=logits.stride, n_experts=num_experts,
        top_k=top_k, scores=scores, bias=bias, groups=groups, groups_used=groups_used, table=table, tokens=b.step.tokens.ctypes.data,
        sampled=b.step.sampled.ctypes.data if factor_source == "sampled" else 0, normalize=normalize, scale=float(scale),
        ids=ids.ctypes.data, weights=weights.ctypes.data, scratch=0, scratch_stride=0,
    )  # fmt: skip
    b.wants_scratch(record, router.ROUTER_FIELDS, router.scratch_bytes(num_experts))
    b.program.add(router.route, record, f"choose {top_k} of {num_experts} experts")
    record = pack(
        router.GROUP_FIELDS, count=pairs, ids=ids.ctypes.data, n_experts=num_experts, offsets=offsets.ctypes.data,
        pairs=order.ctypes.data,
    )  # fmt: skip
    b.program.add(router.group_by_expert, record, "sort the pairs by expert")
    return Routes(num_experts, top_k, pairs, weights, offsets, order)


def experts_by_token(b: Builder, name: str, vocab_size: int, top_k: int, num_experts: int) -> Address:
    """Address of the I32 tensor (vocab_size, top_k) that lists the experts of each token. ModelLoadError where one of them is none."""
    info = b.model.need(name, (vocab_size, top_k), ("I32",))
    listed = b.model.bytes_of(name).view("<i4")
    if listed.min() < 0 or listed.max() >= num_experts:
        raise ModelLoadError(
            f"{b.model.path}: tensor '{info.name}' lists experts {listed.min()} to {listed.max()}, but the model has {num_experts}"
        )
    copy = b.zeros(len(listed), np.int32)
    copy[:] = listed
    return copy.ctypes.data


def experts(
    b: Builder, routes: Routes, h: Rows, towers: Towers, out: Rows, *, activation: Activation = SILU_GATED, accumulate: bool = True,
    meanwhile: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """out += (or =) weighted sum of the chosen experts' down · activation(gate · h, up · h). `meanwhile` adds operations that need not
    wait for them: they are computed while slices are read."""
    gate, up, down = towers.gate or towers.up, towers.up, towers.down
    if activation.gated != (towers.gate is not None):
        raise ValueError(f"{activation} {'needs' if activation.gated else 'has no'} gate")
    weights = [part.weight for part in (towers.gate, towers.up) if part]
    streamed = _streamed(b, routes, h, towers, meanwhile or (lambda: None))
    b.activations(h, weights)
    act, act_stride = b.activation(h, gate.weight.layout)
    up_act, up_act_stride = b.activation(h, up.weight.layout)
    n, top_k, k = up.weight.num_rows, routes.top_k, up.weight.k
    shape = f"{top_k} x {n}"  # may differ from layer to layer
    hidden = b.rows(f"expert hidden {shape}", n, routes.pairs, top_k)
    up_out = b.rows(f"expert up {shape}", n, routes.pairs, top_k)
    y = b.rows(f"expert out {top_k} x {down.weight.num_rows}", down.weight.num_rows, routes.pairs, top_k)
    max_pairs = len(hidden.array)
    shared = {"n_experts": routes.num_experts, "offsets": routes.offsets.ctypes.data, "pairs": routes.order.ctypes.data, "scratch": 0,
              "scratch_stride": 0, "max_count": max_pairs, **streamed.wave}  # fmt: skip
    up_record, down_record = (_record(b, part, streamed) for part in (up, down))
    gate_record = up_record if towers.gate is None else _record(b, gate, streamed)
    if b.advises and not streamed.first:
        _advise(b, routes, towers, {up.tower: up_record, gate.tower: gate_record, down.tower: down_record})
    record = pack(
        moe.UP_FIELDS, **shared, top_k=top_k, kind=activation.kind, limit=float(activation.limit), act=act, act_stride=act_stride,
        up_act=up_act, up_act_stride=up_act_stride,
        gate_tower=gate_record, gate_stride=gate.weight.row_bytes, gate_rows_fn=gate.weight.kernels.rows_address,
        gate_tile_fn=gate.weight.kernels.tile_address, gate_scale=gate.scale, gate_bias=gate.bias,
        up_tower=up_record, up_stride=up.weight.row_bytes, up_rows_fn=up.weight.kernels.rows_address,
        up_tile_fn=up.weight.kernels.tile_address, up_scale=up.scale, up_bias=up.bias, bias_stride=up.bias_stride,
        k=k, n_rows=n, gate_out=hidden.address, up_out=up_out.address, out_stride=hidden.stride,
    )  # fmt: skip
    b.wants_scratch(record, moe.UP_FIELDS, moe.scratch_bytes(max_pairs, tile_scratch_bytes(k)))
    b.program.add(
        moe.experts_up_streamed if streamed.first else moe.experts_up,
        record,
        f"{hidden.name} = {activation}({', '.join(f'{w.name} ({w.encoding})' for w in weights)} · {h.name})",
    )
    act, act_stride = b.activation(hidden, down.weight.layout)
    record = pack(
        moe.DOWN_FIELDS, **shared, act=act, act_stride=act_stride, tower=down_record, stride=down.weight.row_bytes,
        rows_fn=down.weight.kernels.rows_address, tile_fn=down.weight.kernels.tile_address, scale=down.scale, bias=down.bias,
        k=down.weight.k, n_rows=down.weight.num_rows, out=y.address, out_stride=y.stride,
    )  # fmt: skip
    b.wants_scratch(record, moe.DOWN_FIELDS, moe.scratch_bytes(max_pairs, tile_scratch_bytes(down.weight.k)))
    b.program.add(
        moe.experts_down_streamed if streamed.first else moe.experts_down,
        record,
        f"{y.name} = {down.weight.name} ({down.weight.encoding}) · {hidden.name}",
    )
    if streamed.first:
        b.program.repeat_from(streamed.first, b.stream.visit.again_at)
    record = pack(
        moe.COMBINE_FIELDS, count=out.count, top_k=top_k, width=out.width, weights=routes.weights.ctypes.data, y=y.address,
        y_stride=y.stride, x=out.address, x_stride=out.stride, accumulate=accumulate,
    )  # fmt: skip
    b.program.add(moe.combine, record, f"{out.name} {'+' if accumulate else ''}= weighted {y.name}")
    out.quantized.clear()


def _advise(b: Builder, routes: Routes, towers: Towers, records: dict[str, Address]) -> None:
    """`records`: of each tower that of a projection at the beginning of its slices."""
    addresses = [records[name] for name in towers.names]
    addresses += [0] * (moe.MAX_TOWERS - len(addresses))
    record = pack(
        moe.ADVISE_FIELDS, offsets=routes.offsets.ctypes.data, n_experts=routes.num_experts, n_towers=len(towers.names),
        **{f"tower{i}": address for i, address in enumerate(addresses)},
    )  # fmt: skip
    b.program.add(moe.advise, record, f"ask for the chosen slices of {', '.join(towers.names)}", barrier=False)


def _streamed(b: Builder, routes: Routes, h: Rows, towers: Towers, meanwhile: Callable[[], None]) -> Streamed:
    """Add the operations that acquire the layer's slices, if they are streamed, and `meanwhile` behind the first of them."""
    by_tokens = next(c.source for c in b.counts if c.address == h.count) == "tokens"
    asked = b.stream and b.stream.asking(
        towers.names, offsets=routes.offsets.ctypes.data, tokens=h.count,
        seqs=b.count("seqs") if by_tokens else h.count,
    )  # fmt: skip
    if not asked:
        meanwhile()
        return Streamed(0, {}, dict.fromkeys(moe.WAVE_FIELDS, 0))
    asking, places = asked
    # Thread 0 looks up and posts reads, which touches nothing that the operations up to the next barrier read or write.
    b.program.add(slots.acquire_slices, asking.record, f"slots of {', '.join(towers.names)}", barrier=False)
    meanwhile()
    first = len(b.program.operations)
    layouts = [part.weight.layout for part in (towers.gate, towers.up) if part]
    meets = all(layout == "f32" or layout in h.quantized for layout in layouts)
    b.program.add(slots.acquire_more, asking.record, "the next of them, in later waves", barrier=meets)
    waiting = b.shared("experts waited for", (b.num_threads, -(-routes.num_experts // 16) * 16), np.int32)
    visit = b.stream.visit
    wave = {
        "wave": visit.wave.ctypes.data,
        "n_wave": visit.n_wave_at,
        "waiting": waiting.ctypes.data,
        "waiting_stride": waiting.strides[0],
        "ended": visit.store.ended_at,
    }
    return Streamed(first, places, wave)


def _record(b: Builder, part: Projection, streamed: Streamed) -> Address:
    record = pack(
        moe.TOWER_FIELDS, base=part.weight.address, slice_bytes=part.weight.slice_bytes, places=streamed.places.get(part.tower, 0),
        offset=part.offset,
    )  # fmt: skip
    b.keep.append(record)
    return record.ctypes.data
