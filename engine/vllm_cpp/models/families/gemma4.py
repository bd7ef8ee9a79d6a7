"""gemma4 (text): sliding and full layers with heads of their own sizes, keys and values that later layers share, experts beside a dense
part, an embedding for each layer, norms behind each part, capped logits."""

from __future__ import annotations

import numpy as np

from vllm_cpp.gguf_file import GGUFModel
from vllm_cpp.gguf_file.hparams import HyperParameters, Keys
from vllm_cpp.kernels.cpu.elementwise import GELU, Activation
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Address, Builder, Rows
from vllm_cpp.models.operations import attention, experts
from vllm_cpp.models.registry import KvShape, attention_everywhere, family

_DEFAULT_CAP = 30.0  # of logits, in files that do not say
_NEAR_BASE = 10000.0  # rope.freq_base_swa, the same


def sliding_layers(keys: Keys, hp: HyperParameters) -> tuple[bool, ...]:
    key = "attention.sliding_window_pattern"
    flags = keys.flags(key, hp.block_count)
    if flags is None:
        keys.refuse(key, "is missing, expected a flag for each layer")
    return flags


def kv_owners(keys: Keys, hp: HyperParameters) -> list[int]:
    """The layer whose keys and values each layer attends over: the last ones share those of the last sliding and full layer before them."""
    sharing, slides = keys.integer("attention.shared_kv_layers", 0), sliding_layers(keys, hp)
    own = hp.num_layers - sharing
    if sharing and (own < 2 or not slides[own - 2] or slides[own - 1]):
        keys.refuse(
            "attention.shared_kv_layers",
            f"is {sharing} of {hp.num_layers} layers, expected a sliding and a full one before those (attention.sliding_window_pattern)",
        )
    return [il if il < own else own - (2 if slides[il] else 1) for il in range(hp.num_layers)]


def kv_shapes(model: GGUFModel, hp: HyperParameters) -> list[KvShape | None]:
    keys = Keys(model)
    owners, slides = kv_owners(keys, hp), sliding_layers(keys, hp)
    near = keys.integer("attention.key_length_swa", least=1), keys.integer("attention.value_length_swa", least=1)
    shapes: list[KvShape | None] = []
    for il, shape in enumerate(attention_everywhere(model, hp)):
        own = shape and (KvShape(shape.num_kv_heads, *near) if slides[il] else shape)
        shapes.append(own if owners[il] == il else None)
    return shapes


@family("gemma4", kv_shapes=kv_shapes, streams_experts=True, places_experts=True)
def gemma4(b: Builder, hp: HyperParameters) -> None:
    traits = decoder.Traits(
        embedding_scale=hp.embedding_length**0.5,
        attention_scale=1.0,
        mixer_norm="post_attention_norm",
        activation=Activation(GELU),
        expert_width=decoder.expert_length,
        logit_cap=b.keys.number("final_logit_softcapping", _DEFAULT_CAP, positive=False),
    )
    decoder.check_widths(b, hp)
    side = b.keys.integer("embedding_length_per_layer_input")
    mixer = _mixer(b, hp, traits)
    x = decoder.embedding(b, hp, traits)
    sides = side_embeddings(b, hp, x, side) if side else [None] * hp.num_layers

    def feed(il: int, h: Rows, x: Rows) -> None:
        feed_forward(b, hp, traits, il, h, x)
        own = sides[il]
        if own is not None:
            add_side(b, hp, traits, il, own if x.count == own.count else decoder.only_sampled(b, own), x)
        scale = f"blk.{il}.layer_output_scale.weight"
        if scale in b.model.tensors:
            b.scale(x, float(b.floats(scale, (1,))[0]))

    decoder.describe(b, hp, traits, x=x, mixer=mixer, feed=feed)


# -- attention
def _mixer(b: Builder, hp: HyperParameters, traits: decoder.Traits) -> decoder.Mixer:
    slides, owners = sliding_layers(b.keys, hp), kv_owners(b.keys, hp)
    window = b.keys.integer("attention.sliding_window", least=1)
    near = decoder.near_rope(b, hp, b.keys.integer("attention.key_length_swa"), base=_NEAR_BASE, scaling="none")
    turn = decoder.rope_of(b, hp, traits.rope_layout)
    turn_near = decoder.rope_of(b, hp, traits.rope_layout, near, with_factors=False)

    def mixer(il: int, h: Rows) -> decoder.Mixed:
        kv, num_heads = b.kv_layout(owners[il]), hp.num_heads[il]
        by = turn_near if slides[il] else turn
        q = normed_and_stored(b, hp, il, h, by) if owners[il] == il else turned_queries(b, hp, il, h, by, kv.head_dim)
        width = num_heads * kv.value_length
        mixed = b.rows(f"attention {width}", width, h.count)
        attention.attention(b, il, q, mixed, traits.attention_scale, kv_layer=owners[il], window=window if slides[il] else 0)
        return decoder.Mixed(mixed, "attn_output")

    return mixer


def normed_and_stored(b: Builder, hp: HyperParameters, il: int, h: Rows, by: attention.Turn) -> Rows:
    """Queries; their keys and values are stored. Values are normed without weights; a layer without attn_v takes what attn_k gives."""
    kv, eps = b.kv_layout(il), hp.rms_epsilon
    d, num_values = kv.head_dim, kv.num_kv_heads * kv.value_length
    from_keys = f"blk.{il}.attn_v.weight" not in b.model.tensors and f"blk.{il}.attn_qkv.weight" not in b.model.tensors
    if from_keys and kv.value_length != d:
        b.model.need(f"blk.{il}.attn_v.weight", (num_values, h.width))
    q, k, *others = decoder.project(b, il, h, q=hp.num_heads[il] * d, k=kv.num_kv_heads * d, v=0 if from_keys else num_values)
    v = others[0] if others else b.rows(f"v {num_values}", num_values, h.count)
    attention.head_norm(b, others[0] if others else k, kv.value_length, 0, eps, out=v)
    q_norm, k_norm = (b.vector(f"blk.{il}.attn_{part}_norm.weight", d) for part in "qk")
    attention.rope_and_store(b, il, q, k, v, by=by, q_norm=q_norm, k_norm=k_norm, eps=eps)
    return q


def turned_queries(b: Builder, hp: HyperParameters, il: int, h: Rows, by: attention.Turn, d: int) -> Rows:
    """Queries of a layer that attends over another one's keys."""
    (q,) = decoder.project(b, il, h, q=hp.num_heads[il] * d, k=0, v=0)
    attention.norm_and_turn(b, q, d, b.vector(f"blk.{il}.attn_q_norm.weight", d), hp.rms_epsilon, by)
    return q


# -- feed-forward
def feed_forward(b: Builder, hp: HyperParameters, traits: decoder.Traits, il: int, h: Rows, x: Rows) -> None:
    """x += rmsnorm(dense part, or dense part and experts, each normed)."""
    y = b.rows("feed-forward out", x.width, x.count)

    def dense() -> None:
        decoder.dense(b, il, h, x, hp.feed_forward_length[il], activation=traits.activation, out=y)

    def normed(rows: Rows, name: str) -> None:
        decoder.norm(b, hp, f"blk.{il}.{name}", rows, rows.name)

    if f"blk.{il}.ffn_gate_inp.weight" in b.model.tensors:
        seen = b.rows("router in", x.width, x.count)
        b.rmsnorm(x, router_scale(b, il, x.width), hp.rms_epsilon, seen, f"ffn_gate_inp.scale of layer {il}")
        inner = decoder.norm(b, hp, f"blk.{il}.pre_ffw_norm_2", x, "h of experts")
        routed = b.rows("experts out", x.width, x.count)
        routes = decoder.route(b, hp, traits, il, seen)
        towers = experts.towers(b, il, hp.num_experts, decoder.expert_length(hp, il), x.width)
        experts.experts(b, routes, inner, towers, routed, activation=traits.activation, accumulate=False, meanwhile=dense)
        normed(y, "post_ffw_norm_1")
        normed(routed, "post_ffw_norm_2")
        b.add(y, routed)
    else:
        dense()
    normed(y, "post_ffw_norm")
    b.add(x, y)


def router_scale(b: Builder, il: int, n: int) -> Address:
    """The router sees rmsnorm(x) / sqrt(n) * ffn_gate_inp.scale."""
    return b.keep_vector(b.floats(f"blk.{il}.ffn_gate_inp.scale", (n,)) / np.float32(n**0.5))


# -- embeddings of each layer
def side_embeddings(b: Builder, hp: HyperParameters, x: Rows, side: int) -> list[Rows]:
    """What each layer is told of its tokens beside the residual stream, `side` values: from a table, and from the embedding x."""
    width = hp.num_layers * side
    table, projection = (
        b.weight("per_layer_token_embd.weight", hp.vocab_size, width),
        b.weight("per_layer_model_proj.weight", width, x.width),
    )
    norm = b.vector("per_layer_proj_norm.weight", side)
    own, told = b.rows("side embeddings of tokens", width, x.count), b.rows("side embeddings", width, x.count)
    b.embed(table, own)
    b.scale(own, side**0.5)
    b.matmul(projection, x, told)
    b.scale(told, x.width**-0.5)
    attention.head_norm(b, told, side, norm, hp.rms_epsilon)
    b.add(told, own)
    b.scale(told, 2**-0.5)
    return [Rows(f"side embedding {il}", told.array[:, il * side : (il + 1) * side], x.count) for il in range(hp.num_layers)]


def add_side(b: Builder, hp: HyperParameters, traits: decoder.Traits, il: int, own: Rows, x: Rows) -> None:
    """x += rmsnorm(proj · (gelu(inp_gate · x) * the layer's side embedding))."""
    gate, out = b.rows("side gate", own.width, x.count), b.rows("side out", x.width, x.count)
    b.matmul(b.weight(f"blk.{il}.inp_gate.weight", own.width, x.width), x, gate)
    b.activate(gate, own, gate, traits.activation)
    b.matmul(b.weight(f"blk.{il}.proj.weight", x.width, own.width), gate, out)
    decoder.norm(b, hp, f"blk.{il}.post_norm", out, out.name)
    b.add(x, out)
