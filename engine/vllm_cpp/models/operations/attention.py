"""Attention as operations: rope tables, keys and values into their KV blocks, softmax over the context, gates on what comes out.

Owns how a step's tokens are cut up for attention: one plan for each way of cutting, made before its first use in a step. Must not know
architectures.

What a mixer is put together from; wherever `Rows | Heads` stands, plain rows mean heads side by side:

    rope_table          frequencies -> Turn: the step's cosines and sines, once a kind of layer
    rope_and_store      q, k, v -> normed, turned, k and v stored: the fast way, in one pass
    head_norm           each head normed by itself, with or without weights
    turn                a stretch of each head turned, forwards or backwards
    store               k and v as they stand into the layer's KV blocks; v may lie within k's rows
    attention           softmax over stored keys, any layer's; sliding window, sinks, temperature by position
    gate                rows *= sigmoid, softplus or silu of a gate a value or a head
    soft_cap            logits brought softly below a cap
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_cpp.kernels.cpu import attention as attention_ops
from vllm_cpp.kernels.cpu import gates, panel, rope
from vllm_cpp.kernels.cpu.kv_cache import KvLayout
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Address, Builder, Rows

# Partial results of attention a step has room for: more sequences with longer contexts fold their chunks one after the other.
_MAX_SLOTS = 4096
_MAX_PARTIAL_BYTES = 1 << 28  # pages that no step comes to are never touched


@dataclass(frozen=True, slots=True)
class Turn:
    """This step's rope table of `half` pairs, and which values of a head make a pair (rope.NEOX or rope.NEIGHBOURS)."""

    table: Address
    table_stride: int  # bytes between two tokens
    half: int
    layout: int


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads in rows: `count` of them, `length` values each, `step` values from one to the next, beginning at value `first` of a row."""

    rows: Rows
    count: int
    length: int
    step: int
    first: int = 0

    @property
    def address(self) -> Address:
        return self.rows.address + 4 * self.first

    @property
    def stride(self) -> int:
        """Bytes between two rows."""
        return self.rows.stride

    @property
    def head_stride(self) -> int:
        """Bytes between two heads."""
        return 4 * self.step


def heads_of(x: Rows | Heads, length: int) -> Heads:
    """The heads of plain rows: side by side, `length` values each."""
    return x if isinstance(x, Heads) else Heads(x, x.width // length, length, length)


# -- positions
def rope_table(
    b: Builder, frequencies: np.ndarray, magnitude: float, layout: int, *, positions: Address = 0, count: Address = 0, max_rows: int = 0
) -> Turn:
    """Cosines and sines of this step's positions (or of `count` others, i32, at most `max_rows`), angles f64 a position."""
    angles = b.zeros(len(frequencies), np.float64)
    angles[:] = frequencies
    table = b.zeros((max_rows or b.step.max_tokens, -(-2 * len(frequencies) // 16) * 16), np.float32)
    record = pack(
        rope.ROPE_TABLE_FIELDS, count=count or b.count("tokens"), positions=positions or b.step.positions.ctypes.data,
        frequencies=angles.ctypes.data,
        half=len(frequencies), magnitude=float(magnitude), table=table.ctypes.data, table_stride=table.strides[0],
    )  # fmt: skip
    b.program.add(rope.rope_table, record, "cosines and sines of the positions", barrier=bool(positions))
    return Turn(table.ctypes.data, table.strides[0], len(frequencies), layout)


def head_norm(b: Builder, x: Rows | Heads, length: int, weight: Address, eps: float, out: Rows | Heads | None = None) -> None:
    """Each head of x normed by itself (rmsnorm, in place or to `out`); `weight` f32[length], or 0: none."""
    _turn_heads(b, heads_of(x, length), None, normed=True, weight=weight, eps=eps, label="norm", out=out and heads_of(out, length))


def turn(b: Builder, x: Rows | Heads, length: int, by: Turn, *, first: int = 0, backwards: bool = False) -> None:
    """Turn 2 * by.half values of each head of x in place, from value `first` of the head on; `backwards`: by the negative angle."""
    _turn_heads(b, heads_of(x, length), by, first=first, backwards=backwards, label="turn back" if backwards else "turn")


def norm_and_turn(b: Builder, x: Rows | Heads, length: int, weight: Address, eps: float, by: Turn) -> None:
    """`head_norm` and `turn` in one pass."""
    _turn_heads(b, heads_of(x, length), by, normed=True, weight=weight, eps=eps, label="norm and turn")


def _turn_heads(
    b: Builder, x: Heads, by: Turn | None, *, normed: bool = False, weight: Address = 0, eps: float = 0.0, first: int = 0,
    backwards: bool = False, label: str, out: Heads | None = None,
) -> None:  # fmt: skip
    out = out or x
    if by is not None and first + 2 * by.half > x.length:
        raise ValueError(f"{2 * by.half} values from {first} on do not fit a head of {x.length} ({x.rows.name})")
    record = pack(
        rope.TURN_HEADS_FIELDS, count=x.rows.count, x=x.address, x_stride=x.stride, head_stride=x.head_stride, out=out.address,
        out_stride=out.stride, out_head_stride=out.head_stride, n_heads=x.count, length=x.length, normed=normed, norm=weight,
        eps=float(eps), layout=0 if by is None else by.layout,
        half=0 if by is None else by.half, first=first, backwards=backwards, table=0 if by is None else by.table,
        table_stride=0 if by is None else by.table_stride,
    )  # fmt: skip
    b.program.add(rope.turn_heads, record, f"{'' if out is x else f'{out.rows.name} = '}{label} the heads of {x.rows.name}")
    out.rows.quantized.clear()


# -- keys and values
def rope_and_store(
    b: Builder,
    il: int,
    q: Rows | Heads,
    k: Rows,
    v: Rows,
    *,
    by: Turn | None,
    q_norm: Address = 0,
    k_norm: Address = 0,
    eps: float = 0.0,
) -> None:
    """Norm the heads (weights may be 0: no norm), turn q and k in place by `by` (None: not), write k and v of layer `il` to their KV
    blocks."""
    q = heads_of(q, b.kv_layout(il).head_dim)
    _store(b, il, q, k, v, by, q_norm, k_norm, eps, f"turn {q.rows.name}, {k.name}; store {k.name}, {v.name} of layer {il}")
    q.rows.quantized.clear()
    k.quantized.clear()


def store(b: Builder, il: int, k: Rows, v: Rows) -> None:
    """Write k and v, heads side by side, to the KV blocks of layer `il` as they stand. `v` may be `k`: of one KV head, values are then the
    first value_length values of its key."""
    _store(b, il, None, k, v, None, 0, 0, 0.0, f"store {k.name}, {v.name} of layer {il}")


def _store(
    b: Builder, il: int, q: Heads | None, k: Rows, v: Rows, by: Turn | None, q_norm: Address, k_norm: Address, eps: float, label: str
) -> None:
    kv, step = b.kv_layout(il), b.step
    k_cache, v_cache = b.kv_cache(il)
    if k.width != kv.num_kv_heads * kv.head_dim or (v.width != kv.num_kv_heads * kv.value_length and (v is not k or kv.num_kv_heads > 1)):
        raise ValueError(f"{k.name} and {v.name} have {k.width} and {v.width} values, the KV blocks of layer {il} are for {kv}")
    record = pack(
        rope.ROPE_STORE_FIELDS, count=k.count, q=q.address if q else 0, q_stride=q.stride if q else 0,
        q_head_stride=q.head_stride if q else 0, k=k.address, k_stride=k.stride, v=v.address, v_stride=v.stride,
        n_heads=q.count if q else 0, n_kv_heads=kv.num_kv_heads, head_dim=kv.head_dim, value_length=kv.value_length,
        layout=by.layout if by else 0, half=by.half if by else 0, table=by.table if by else 0, table_stride=by.table_stride if by else 0,
        q_norm=q_norm, k_norm=k_norm, eps=float(eps), k_cache=k_cache.ctypes.data, v_cache=v_cache.ctypes.data,
        block_size=kv.block_size, num_blocks=b.num_kv_blocks, kv_format=kv.kv_format, k_bytes=kv.k_bytes, v_bytes=kv.v_bytes,
        positions=step.positions.ctypes.data, seqs=step.seqs.ctypes.data,
        block_tables=step.block_tables.ctypes.data, block_tables_stride=step.block_tables.strides[0],
    )  # fmt: skip
    b.program.add(rope.rope_store, record, label)


# -- softmax over the context
def _plan(b: Builder, num_heads: int, kv: KvLayout, window: int) -> tuple[np.ndarray, int]:
    """The plan of this step's tokens for so many heads, and how many partial results it has room for. Its operation is added once, before
    the first attention that goes by it."""
    step, chunk = b.step, attention_ops.chunk_tokens(kv.block_size, kv.head_dim)
    tile_tokens = attention_ops.tile_tokens(num_heads, kv.num_kv_heads)
    seen = step.max_blocks * kv.block_size
    chunks = -(-min(seen, window + attention_ops.SPLIT_TOKENS + chunk if window else seen) // chunk)
    slots = min(step.max_seqs * chunks, _MAX_SLOTS, _MAX_PARTIAL_BYTES // attention_ops.partial_bytes(num_heads, kv.value_length))
    key = f"attention plan, {tile_tokens} tokens a tile, {chunk} keys a chunk, window {window}, {slots} slots"
    if key not in b.arrays:
        plan = b.arrays[key] = b.zeros(attention_ops.plan_words(step.max_tokens, slots), np.int32)
        record = pack(
            attention_ops.PLAN_FIELDS, count=b.count("tokens"), positions=step.positions.ctypes.data, seqs=step.seqs.ctypes.data,
            tile_tokens=tile_tokens, chunk_tokens=chunk, window=window, n_slots=slots, plan=plan.ctypes.data,
            max_items=step.max_tokens + slots,
        )  # fmt: skip
        b.program.add(attention_ops.attention_plan, record, f"plan of attention{f' over {window} keys' if window else ''}")
    return b.arrays[key], slots


def attention(
    b: Builder,
    il: int,
    q: Rows | Heads,
    out: Rows,
    scale: float,
    *,
    kv_layer: int | None = None,
    window: int = 0,
    sinks: Address = 0,
    temperature: float = 0.0,
    temperature_context: int = 1,
) -> None:
    """out = causal attention of q over the stored keys and values of layer `il`, or of `kv_layer` where that is given.

    A key at p is seen from q iff q - p < `window` (0: no bound). `sinks`: f32 [num_heads], one more logit a head whose probability is
    thrown away, or 0. Queries at position p are multiplied by 1 + temperature * ln(1 + p // temperature_context) too.
    """
    source = il if kv_layer is None else kv_layer
    kv, step = b.kv_layout(source), b.step
    k_cache, v_cache = b.kv_cache(source)
    q = heads_of(q, kv.head_dim)
    if q.length != kv.head_dim or out.width != q.count * kv.value_length:
        raise ValueError(f"{q.rows.name} has heads of {q.length}, {out.name} {out.width} values; layer {source} keeps {kv}")
    k_product, v_product = panel.PRODUCTS[kv.dtype]
    plan, slots = _plan(b, q.count, kv, window)
    partials = b.shared("attention partials", slots * attention_ops.partial_bytes(q.count, kv.value_length), np.uint8)
    record = pack(
        attention_ops.ATTENTION_FIELDS, plan=plan.ctypes.data, max_items=step.max_tokens + slots, q=q.address,
        q_stride=q.stride, q_head_stride=q.head_stride, out=out.address, out_stride=out.stride, n_heads=q.count, n_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim, value_length=kv.value_length, scale=float(scale), temperature=float(temperature),
        temperature_context=temperature_context, window=window, sinks=sinks,
        k_cache=k_cache.ctypes.data, v_cache=v_cache.ctypes.data, block_size=kv.block_size, num_blocks=b.num_kv_blocks,
        block_tables=step.block_tables.ctypes.data,
        block_tables_stride=step.block_tables.strides[0], k_bytes=kv.k_bytes, k_stride=kv.k_stride, v_bytes=kv.v_bytes,
        v_stride=kv.v_stride, k_product_fn=k_product.address, v_product_fn=v_product.address,
        chunk_tokens=attention_ops.chunk_tokens(kv.block_size, kv.head_dim),
        partials=partials.ctypes.data, scratch=0, scratch_stride=0,
    )  # fmt: skip
    scratch = attention_ops.scratch_bytes(q.count, kv.num_kv_heads, kv.head_dim, kv.value_length, kv.block_size)
    b.wants_scratch(record, attention_ops.ATTENTION_FIELDS, scratch)
    b.program.add(attention_ops.attention, record, f"{out.name} = attention({q.rows.name}) of layer {il}")
    b.program.add(attention_ops.attention_merge, record, f"{out.name}: merge the chunks of long contexts")
    out.quantized.clear()


def gate(b: Builder, x: Rows, by: Rows | Heads, kind: int, length: int) -> None:
    """x *= kind(gate) (gates.SIGMOID, SOFTPLUS or SILU), heads of `length` values. A gate has one value a head, or one for each value of
    x."""
    num_heads = x.width // length
    if not isinstance(by, Heads):
        by = heads_of(by, by.width // num_heads)
    if by.count != num_heads or by.length not in (1, length):
        raise ValueError(f"{by.rows.name} has {by.count} gates of {by.length}; {x.name} has {num_heads} heads of {length}")
    record = pack(
        gates.GATE_FIELDS, count=x.count, x=x.address, x_stride=x.stride, n_heads=num_heads, length=length, gate=by.address,
        gate_stride=by.stride, gate_head_stride=by.head_stride, each=by.length == length, kind=kind,
    )  # fmt: skip
    name = ("sigmoid", "softplus", "silu")[kind]
    b.program.add(gates.gate, record, f"{x.name} *= {name}({by.rows.name})")
    x.quantized.clear()


def soft_cap(b: Builder, count: Address, cap: float) -> None:
    """The logits of this step become cap * tanh(logit / cap)."""
    assert b.first_row is not None, "logits are capped behind the head"
    record = pack(
        gates.SOFT_CAP_FIELDS, count=count, first_row=b.first_row.ctypes.data, stride=b.logits.strides[0], width=b.logits.shape[1],
        cap=float(cap),
    )  # fmt: skip
    b.program.add(gates.soft_cap, record, f"logits below {cap:g}")
