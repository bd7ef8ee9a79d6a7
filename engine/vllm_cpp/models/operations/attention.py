"""Attention as operations: rope tables, keys and values into their KV blocks, softmax over the context.

Owns how a step's tokens are cut up for attention: one plan for each way of cutting, made before its first use in a step. Must not know
architectures.
"""

from __future__ import annotations

import numpy as np

from vllm_cpp.kernels.cpu import attention as attention_ops
from vllm_cpp.kernels.cpu import panel, rope
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Address, Builder, Rows

# Partial results of attention a step has room for: more sequences with longer contexts fold their chunks one after the other.
_MAX_SLOTS = 4096


def rope_table(b: Builder, frequencies: np.ndarray, magnitude: float) -> tuple[Address, int]:
    """Cosines and sines of this step's positions; address and bytes between two tokens."""
    angles = b.zeros(len(frequencies), np.float64)
    angles[:] = frequencies
    table = b.zeros((b.step.max_tokens, -(-2 * len(frequencies) // 16) * 16), np.float32)
    record = pack(
        rope.ROPE_TABLE_FIELDS, count=b.count("tokens"), positions=b.step.positions.ctypes.data, frequencies=angles.ctypes.data,
        half=len(frequencies), magnitude=float(magnitude), table=table.ctypes.data, table_stride=table.strides[0],
    )  # fmt: skip
    b.program.add(rope.rope_table, record, "cosines and sines of the positions", barrier=False)
    return table.ctypes.data, table.strides[0]


def _plan(b: Builder, n_heads: int, n_kv_heads: int) -> tuple[np.ndarray, int]:
    """The plan of this step's tokens for so many heads, and how many partial results it has room for. Its operation is added once, before
    the first attention that goes by it."""
    step, block_size = b.step, b.block_size
    tile_tokens = attention_ops.tile_tokens(n_heads, n_kv_heads)
    chunks = -(-step.max_blocks * block_size // attention_ops.chunk_tokens(block_size))
    slots = min(step.max_seqs * chunks, _MAX_SLOTS)
    key = f"attention plan, {tile_tokens} tokens a tile"
    if key not in b.arrays:
        plan = b.arrays[key] = b.zeros(attention_ops.plan_words(step.max_tokens, slots), np.int32)
        record = pack(
            attention_ops.PLAN_FIELDS, count=b.count("tokens"), positions=step.positions.ctypes.data, seqs=step.seqs.ctypes.data,
            tile_tokens=tile_tokens, chunk_tokens=attention_ops.chunk_tokens(block_size), n_slots=slots,
            plan=plan.ctypes.data, max_items=step.max_tokens + slots,
        )  # fmt: skip
        b.program.add(attention_ops.attention_plan, record, "plan of attention")
    return b.arrays[key], slots


def rope_and_store(
    b: Builder,
    il: int,
    q: Rows,
    k: Rows,
    v: Rows,
    *,
    layout: int,
    table: tuple[Address, int],
    half: int,
    q_norm: Address,
    k_norm: Address,
    eps: float,
) -> None:
    """Norm the heads (weights may be 0), turn q and k in place, write k and v of layer `il` to their KV blocks."""
    kv, step = b.kv_layout(il), b.step
    k_cache, v_cache = b.kv_cache(il)
    record = pack(
        rope.ROPE_STORE_FIELDS, count=q.count, q=q.address, q_stride=q.stride, k=k.address, k_stride=k.stride, v=v.address,
        v_stride=v.stride,
        n_heads=q.width // kv.head_dim, n_kv_heads=kv.n_kv_heads, head_dim=kv.head_dim, layout=layout, half=half, table=table[0],
        table_stride=table[1], q_norm=q_norm, k_norm=k_norm, eps=float(eps), k_cache=k_cache.ctypes.data, v_cache=v_cache.ctypes.data,
        block_size=kv.block_size, num_blocks=b.num_kv_blocks, kv_format=kv.kv_format, k_bytes=kv.k_bytes, v_bytes=kv.v_bytes,
        positions=step.positions.ctypes.data, seqs=step.seqs.ctypes.data,
        block_tables=step.block_tables.ctypes.data, block_tables_stride=step.block_tables.strides[0],
    )  # fmt: skip
    b.program.add(rope.rope_store, record, f"turn {q.name}, {k.name}; store {k.name}, {v.name} of layer {il}")
    q.quantized.clear()
    k.quantized.clear()


def attention(b: Builder, il: int, q: Rows, out: Rows, scale: float) -> None:
    """out = causal attention of q over the stored keys and values of layer `il`."""
    kv, step = b.kv_layout(il), b.step
    k_cache, v_cache = b.kv_cache(il)
    n_heads = q.width // kv.head_dim
    k_product, v_product = panel.PRODUCTS[kv.dtype]
    plan, slots = _plan(b, n_heads, kv.n_kv_heads)
    partials = b.shared("attention partials", slots * attention_ops.partial_bytes(n_heads, kv.head_dim), np.uint8)
    record = pack(
        attention_ops.ATTENTION_FIELDS, plan=plan.ctypes.data, max_items=step.max_tokens + slots, q=q.address,
        q_stride=q.stride,
        out=out.address, out_stride=out.stride, n_heads=n_heads, n_kv_heads=kv.n_kv_heads, head_dim=kv.head_dim, scale=float(scale),
        k_cache=k_cache.ctypes.data, v_cache=v_cache.ctypes.data, block_size=kv.block_size, num_blocks=b.num_kv_blocks,
        block_tables=step.block_tables.ctypes.data,
        block_tables_stride=step.block_tables.strides[0], k_bytes=kv.k_bytes, k_stride=kv.k_stride, v_bytes=kv.v_bytes,
        v_stride=kv.v_stride, k_product_fn=k_product.address, v_product_fn=v_product.address,
        chunk_tokens=attention_ops.chunk_tokens(kv.block_size),
        partials=partials.ctypes.data, scratch=0, scratch_stride=0,
    )  # fmt: skip
    b.wants_scratch(record, attention_ops.ATTENTION_FIELDS, attention_ops.scratch_bytes(n_heads, kv.n_kv_heads, kv.head_dim, kv.block_size))
    b.program.add(attention_ops.attention, record, f"{out.name} = attention({q.name}) of layer {il}")
    b.program.add(attention_ops.attention_merge, record, f"{out.name}: merge the chunks of long contexts")
    out.quantized.clear()
