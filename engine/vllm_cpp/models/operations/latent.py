"""Latent attention as operations: queries and keys meet in a small space that all heads share, and only its row is kept of a token.

Owns the order of these operations and both forms in which files hold their matrices. Must not know architectures: a family says whether
anything turns, and by how much scores are scaled (FAMILIES: Latent attention).

Absorbed (attn_k_b and attn_v_b): per head, q' = [k_b · q_nope ; q_rope] against the token's row [rmsnorm(c) ; k_rope], which is key and
(its first `rank` values) value at once; then v_b takes the weighted sum of rows out of the latent space. A token keeps rank + rope numbers.

Expanded (attn_kv_b, older files): every head's keys and values are made when the token comes, and kept: num_heads * (nope + rope + value)
numbers. Absorbing such a file while loading (its key rows transposed) would save that, but rounds other activations than the file's makers
saw: routers with near ties then choose other experts than llama.cpp does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_cpp.gguf_file import GGUFModel
from vllm_cpp.gguf_file.hparams import HyperParameters, Keys
from vllm_cpp.kernels.cpu import heads
from vllm_cpp.kernels.cpu.registry import tile_scratch_bytes
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Address, Builder, Rows, Weight
from vllm_cpp.models.operations import attention as attention_ops
from vllm_cpp.models.operations.attention import Heads, Turn
from vllm_cpp.models.registry import KvShape


@dataclass(frozen=True, slots=True)
class Latent:
    """Lengths of latent attention. A query head is [nope | rope], a token's row [rank | rope], a head's result `value` values."""

    num_heads: int
    rank: int
    nope: int
    rope: int
    value: int

    @property
    def query(self) -> int:
        return self.nope + self.rope

    @property
    def row(self) -> int:
        return self.rank + self.rope


def latent_of(keys: Keys, hp: HyperParameters) -> Latent:
    """The lengths as the keys give them: attention.{key,value}_length_mla, or {key,value}_length in files of the older form."""
    query, value = (
        keys.integer(f"attention.{part}_length_mla", length, least=1)
        for part, length in (("key", hp.key_length), ("value", hp.value_length))
    )
    rank, rope = keys.integer("attention.kv_lora_rank", least=1), hp.rope.dimension_count
    if rope >= query:
        keys.refuse("rope.dimension_count", f"is {rope}, expected less than a head's length, {query} (attention.key_length_mla)")
    return Latent(hp.num_heads[0], rank, query - rope, rope, value)


def is_expanded(model: GGUFModel) -> bool:
    """Whether the file holds the matrices of the expanded form."""
    return any(name.endswith(".attn_kv_b.weight") for name in model.tensors)


def latent_shape(model: GGUFModel, hp: HyperParameters) -> KvShape:
    """What a layer with latent attention keeps of a token."""
    latent = latent_of(Keys(model), hp)
    return KvShape(latent.num_heads, latent.query, latent.value) if is_expanded(model) else KvShape(1, latent.row, latent.rank)


def latent_everywhere(model: GGUFModel, hp: HyperParameters) -> list[KvShape | None]:
    """Latent attention in every layer."""
    return [latent_shape(model, hp)] * hp.num_layers


def latent_where_heads(model: GGUFModel, hp: HyperParameters) -> list[KvShape | None]:
    """Latent attention in the layers that attention.head_count_kv gives heads; the others keep no keys."""
    shape = latent_shape(model, hp)
    return [shape if n else None for n in hp.num_kv_heads[: hp.num_layers]]


# -- products by head
def rows_of_heads(b: Builder, name: str, num_heads: int, length: int) -> Rows:
    """A buffer of the step's tokens [tokens, num_heads * length] without padding between them, so that all heads of all tokens are rows of
    one table: what `heads_product` reads."""
    array = b.shared(name, (b.step.max_tokens, num_heads * length), np.float32)
    return Rows(name, array, b.count("tokens"))


def heads_product(b: Builder, w: Weight, num_heads: int, x: Rows, x_length: int, out: Heads, *, scale: Address = 0) -> None:
    """out[t, h] = w[h] · (the first w.k values of x's head h) * scale[h]. `w` is a tower of num_heads matrices; x comes from
    `rows_of_heads`, its heads are `x_length` values long; a head of `out` takes w.num_rows values."""
    by_head = Rows(f"{x.name} by head", x.array.reshape(-1, x_length)[:, : w.k], b.count("tokens", num_heads))
    act, act_head = b.activation(by_head, w.layout)
    record = pack(
        heads.PRODUCT_FIELDS, count=x.count, n_heads=num_heads, k=w.k, n_rows=w.num_rows, act=act, act_stride=act_head * num_heads,
        act_head=act_head, w=w.address, w_stride=w.row_bytes, slice_bytes=w.slice_bytes, rows_fn=w.kernels.rows_address,
        tile_fn=w.kernels.tile_address, scale=scale, out=out.address, out_stride=out.stride, out_head=out.head_stride, scratch=0,
        scratch_stride=0, max_count=len(x.array),
    )  # fmt: skip
    b.wants_scratch(record, heads.PRODUCT_FIELDS, heads.scratch_bytes(len(x.array), tile_scratch_bytes(w.k)))
    b.program.add(heads.heads_product, record, f"{out.rows.name} = {w.name} ({w.encoding}) · {x.name}, by head")
    out.rows.quantized.clear()


def _copy(b: Builder, x: Heads, out: Heads, *, barrier: bool = False) -> None:
    """The heads of x into those of `out`; one head of x into all of them."""
    record = pack(
        heads.COPY_FIELDS, count=b.count("tokens", out.count), x=x.address, x_stride=x.stride if x.count < out.count else x.head_stride,
        width=x.length, repeat=out.count // x.count, out=out.address, out_stride=out.head_stride,
    )  # fmt: skip
    b.program.add(heads.copy_rows, record, f"{out.rows.name} = {x.rows.name}, {x.length} values a head", barrier)
    out.rows.quantized.clear()


# -- the mixer
def latent_attention(
    b: Builder, hp: HyperParameters, il: int, h: Rows, latent: Latent, *, by: Turn | None, scale: float, temperature: float = 0.0,
    temperature_context: int = 1,
) -> Rows:  # fmt: skip
    """Attention of layer `il` up to, not including, its output matrix: [tokens, num_heads * value], a head beside the other. `by` turns the
    trailing `rope` values of queries and of the key (None: nothing turns); scores are multiplied by `scale`, and by the temperature of a
    query's position (see attention.attention)."""
    num_heads = latent.num_heads
    k_b, v_b = _towers(b, il, latent)  # with the projections: every length is borne out by a tensor before a buffer is made of it
    projections = _projections(b, il, h.width, latent)
    q, row = rows_of_heads(b, "q", num_heads, latent.query), b.rows("latent row", latent.row, h.count)
    _project(b, hp, il, h, projections, q, row)
    c = Rows("latent", row.array[:, : latent.rank], h.count)
    b.rmsnorm(c, b.vector(f"blk.{il}.attn_kv_a_norm.weight", latent.rank), hp.rms_epsilon, c, f"attn_kv_a_norm of layer {il}")
    if by is not None:
        attention_ops.turn(b, q, latent.query, by, first=latent.nope)
        attention_ops.turn(b, row, latent.row, by, first=latent.rank)
    out = rows_of_heads(b, "attention", num_heads, latent.value)
    warmth = {"temperature": temperature, "temperature_context": temperature_context}
    if v_b is None:
        _store_expanded(b, il, k_b, c, row, latent)
        attention_ops.attention(b, il, q, out, scale, **warmth)
        return out
    attention_ops.store(b, il, row, row)
    query, mixed = rows_of_heads(b, "latent query", num_heads, latent.row), rows_of_heads(b, "latent mixed", num_heads, latent.rank)
    _copy(b, Heads(q, num_heads, latent.rope, latent.query, latent.nope), Heads(query, num_heads, latent.rope, latent.row, latent.rank))
    heads_product(b, k_b, num_heads, q, latent.query, Heads(query, num_heads, latent.rank, latent.row), scale=_scale(b, k_b, num_heads))
    attention_ops.attention(b, il, query, mixed, scale, **warmth)
    heads_product(b, v_b, num_heads, mixed, latent.rank, Heads(out, num_heads, latent.value, latent.value), scale=_scale(b, v_b, num_heads))
    return out


def _store_expanded(b: Builder, il: int, kv_b: Weight, c: Rows, row: Rows, latent: Latent) -> None:
    """Keys [kv_b's key rows · c ; k_rope] and values (kv_b's value rows · c) of every head into the KV blocks."""
    num_heads, both = latent.num_heads, latent.nope + latent.value
    kv = rows_of_heads(b, "expanded latent", num_heads, both)
    b.matmul(kv_b, c, kv, scale=_scale(b, kv_b))
    k, v = rows_of_heads(b, "k", num_heads, latent.query), rows_of_heads(b, "v", num_heads, latent.value)
    _copy(b, Heads(kv, num_heads, latent.nope, both), Heads(k, num_heads, latent.nope, latent.query))
    _copy(b, Heads(row, 1, latent.rope, latent.row, latent.rank), Heads(k, num_heads, latent.rope, latent.query, latent.nope))
    _copy(b, Heads(kv, num_heads, latent.value, both, latent.nope), Heads(v, num_heads, latent.value, latent.value), barrier=True)
    attention_ops.store(b, il, k, v)


def _towers(b: Builder, il: int, latent: Latent) -> tuple[Weight, Weight | None]:
    """k_b (num_heads, rank, nope) and v_b (num_heads, value, rank); or kv_b (num_heads * (nope + value), rank) and None."""
    name = f"blk.{il}.attn"
    if is_expanded(b.model):
        return b.weight(f"{name}_kv_b.weight", latent.num_heads * (latent.nope + latent.value), latent.rank), None
    k_b = b.tower(f"{name}_k_b.weight", latent.num_heads, latent.rank, latent.nope)
    return k_b, b.tower(f"{name}_v_b.weight", latent.num_heads, latent.value, latent.rank)


class _Projections(NamedTuple):
    """What is made of a layer's input: [c ; k_rope], and queries, by a low rank in between where the file has attn_q_a."""

    row: Weight
    down: Weight | None
    query: Weight


def _projections(b: Builder, il: int, n: int, latent: Latent) -> _Projections:
    name, width = f"blk.{il}.attn", latent.num_heads * latent.query
    row = b.weight(f"{name}_kv_a_mqa.weight", latent.row, n)
    if f"{name}_q_a.weight" not in b.model.tensors:
        return _Projections(row, None, b.weight(f"{name}_q.weight", width, n))
    rank = b.keys.integer("attention.q_lora_rank", least=1)
    return _Projections(row, b.weight(f"{name}_q_a.weight", rank, n), b.weight(f"{name}_q_b.weight", width, rank))


def _project(b: Builder, hp: HyperParameters, il: int, h: Rows, by: _Projections, q: Rows, row: Rows) -> None:
    """q and [c ; k_rope] of h. Both first products run without waiting for each other."""
    first = by.query if by.down is None else by.down
    low = q if by.down is None else b.rows("low-rank query", by.down.num_rows, h.count)
    b.activations(h, [by.row, first])
    b.matmul(by.row, h, row, scale=_scale(b, by.row), barrier=False)
    b.matmul(first, h, low, scale=_scale(b, first))
    if by.down is not None:
        b.rmsnorm(low, b.vector(f"blk.{il}.attn_q_a_norm.weight", low.width), hp.rms_epsilon, low, f"attn_q_a_norm of layer {il}")
        b.matmul(by.query, low, q, scale=_scale(b, by.query))


def _scale(b: Builder, w: Weight, n: int = 1) -> Address:
    """Address of the matrix' (or tower's: one f32 a head) second scale, or 0."""
    return b.maybe_vector(w.name.removesuffix(".weight") + ".scale", n)
