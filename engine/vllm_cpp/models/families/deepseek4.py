"""deepseek4: four residual streams, attention over a window and compressed entries, experts. The first layers list experts by token."""

from __future__ import annotations

import math
from dataclasses import replace

from vllm_cpp.gguf_file import GGUFModel
from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import elementwise, rope, router
from vllm_cpp.kernels.cpu.streams import STREAMS
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows, Weight
from vllm_cpp.models.operations import attention, compressed, latent, streams
from vllm_cpp.models.operations import experts as expert_ops
from vllm_cpp.models.operations.attention import Heads
from vllm_cpp.models.registry import KvShape, family

TRAITS = decoder.Traits(
    expert_scores=router.SQRT_SOFTPLUS, needs_expert_bias=True, normalize_experts=None, scale_experts=True,
    expert_width=decoder.expert_length, shared_width=decoder.shared_by_count, tied_head=False,
)  # fmt: skip
_CHOOSING_RATIO = 4  # layers with blocks of so many tokens choose among them
_MOST_ITERATIONS = 1000  # the real model has 20
_RATIOS = (0, _CHOOSING_RATIO, 128)


def no_kv_blocks(model: GGUFModel, hp: HyperParameters) -> list[KvShape | None]:  # noqa: ARG001 - every KvShapes takes both
    """All that layers keep lies in their state (operations/compressed.py)."""
    return [None] * hp.num_layers


@family("deepseek4", kv_shapes=no_kv_blocks, state_grows=True, streams_experts=True, places_experts=True)
def deepseek4(b: Builder, hp: HyperParameters) -> None:
    n = hp.embedding_length
    _check(b, hp)
    mixer = _Attention(b, hp)
    experts = _Experts(b, hp)
    mixing = streams.Mixing(
        b.keys.integer("hyper_connection.sinkhorn_iterations", least=1, most=_MOST_ITERATIONS),
        b.keys.number("hyper_connection.epsilon"),
        hp.rms_epsilon,
    )
    x = streams.begin(b, b.weight("token_embd.weight", hp.vocab_size, n))
    for il in range(hp.num_layers):
        read, mix = streams.read(b, x, f"blk.{il}.hc_attn", mixing)
        streams.write(b, x, mix, mixer.compute(il, decoder.norm(b, hp, f"blk.{il}.attn_norm", read)))
        if il == hp.num_layers - 1:
            x = decoder.only_sampled(b, x)  # from here on only the rows whose logits are wanted matter
        read, mix = streams.read(b, x, f"blk.{il}.hc_ffn", mixing)
        streams.write(b, x, mix, experts.compute(il, decoder.norm(b, hp, f"blk.{il}.ffn_norm", read)))
    read, _ = streams.read(b, x, "output_hc", mixing, writes=False)
    decoder.head(b, hp, TRAITS, read)


def _check(b: Builder, hp: HyperParameters) -> None:
    count = b.keys.integer("hyper_connection.count")
    if count != STREAMS:
        b.keys.refuse("hyper_connection.count", f"is {count}, expected {STREAMS}")
    if hp.rope.scaling == "longrope":
        b.keys.refuse("rope.scaling.type", "is 'longrope', expected none, linear or yarn")
    if hp.expert_gating_func not in (None, 4):
        b.keys.refuse("expert_gating_func", f"is {hp.expert_gating_func}, expected 4 (the root of softplus)")
    if not hp.num_experts:
        b.keys.refuse("expert_count", "is missing or 0; every layer of deepseek4 has experts")


class _Attention:
    """The first half of every layer (FAMILIES: deepseek4, Attention and Compressed entries)."""

    def __init__(self, b: Builder, hp: HyperParameters) -> None:
        keys = b.keys
        self.b, self.hp, self.num_heads, self.d = b, hp, hp.num_heads[0], hp.key_length
        self.q_rank = keys.integer("attention.q_lora_rank", least=1)
        self.window = keys.integer("attention.sliding_window", least=1)
        self.groups = keys.integer("attention.output_group_count", least=1)
        self.out_rank = keys.integer("attention.output_lora_rank", least=1)
        self.index_heads = keys.integer("attention.indexer.head_count", least=1)
        self.index_width = keys.integer("attention.indexer.key_length", least=1)
        self.top = keys.integer("attention.indexer.top_k", least=1)
        self.rot = hp.rope.dimension_count
        if self.num_heads % self.groups:
            keys.refuse("attention.output_group_count", f"is {self.groups}, which does not divide attention.head_count, {self.num_heads}")
        if self.rot > self.index_width:
            keys.refuse("rope.dimension_count", f"is {self.rot}, more than attention.indexer.key_length, {self.index_width}")
        ratios = b.model.kv.get_array("deepseek4.attention.compress_ratios", "int").tolist()
        if len(ratios) < hp.num_layers or not set(ratios[: hp.num_layers]) <= set(_RATIOS):
            keys.refuse("attention.compress_ratios", f"is {ratios}, expected one of {_RATIOS} for each of {hp.num_layers} layers")
        self.ratios: list[int] = ratios
        plain, _ = rope.rope_frequencies(self.rot, hp.rope.freq_base)
        long, _ = rope.rope_frequencies(
            self.rot, keys.number("attention.compress_rope_freq_base"), scaling=hp.rope.scaling, factor=hp.rope.factor,
            original_context=hp.rope.original_context_length,
        )  # fmt: skip
        self.entry_positions = compressed.Positions(long, 1.0)
        self.plain_turn, self.long_turn = (attention.rope_table(b, angles, 1.0, rope.NEIGHBOURS) for angles in (plain, long))

    def compute(self, il: int, h: Rows) -> Rows:
        """What the tokens tell each other, brought back to rows of h's width."""
        b, hp, d, ratio, name = self.b, self.hp, self.d, self.ratios[il], f"blk.{il}"
        n, eps, turn = h.width, hp.rms_epsilon, self.long_turn if ratio else self.plain_turn
        # Every length is borne out by a tensor before a buffer is made of it.
        q_a, kv = b.weight(f"{name}.attn_q_a.weight", self.q_rank, n), b.weight(f"{name}.attn_kv.weight", d, n)
        q_b, output = b.weight(f"{name}.attn_q_b.weight", self.num_heads * d, self.q_rank), self._output_weights(il, n)
        indexer = self._indexer_weights(il, n) if ratio == _CHOOSING_RATIO else None
        low, x = b.rows("low-rank query", self.q_rank, h.count), b.rows("window row", d, h.count)
        b.activations(h, [q_a, kv])
        b.matmul(q_a, h, low, barrier=False)
        b.matmul(kv, h, x)
        b.rmsnorm(low, b.vector(f"{name}.attn_q_a_norm.weight", self.q_rank), eps, low, f"attn_q_a_norm of layer {il}")
        b.rmsnorm(x, b.vector(f"{name}.attn_kv_a_norm.weight", d), eps, x, f"attn_kv_a_norm of layer {il}")
        q = b.rows("q", self.num_heads * d, h.count)
        b.matmul(q_b, low, q)
        attention.head_norm(b, q, d, 0, eps)
        attention.turn(b, q, d, turn, first=d - self.rot)
        attention.turn(b, x, d, turn, first=d - self.rot)
        sinks = b.vector(f"{name}.attn_sinks.weight", self.num_heads)
        layer = compressed.Layer(b, il, window=self.window, width=d, ratio=ratio, index_width=self.index_width if indexer else 0)
        entries = choice = None
        if ratio:
            entries = layer.compress(f"{name}.attn_compressor", "entries", h, d, eps, self.entry_positions)
        if indexer:
            choice = self._choose(il, layer, h, low, indexer)
        out = latent.rows_of_heads(b, "attention", self.num_heads, d)
        layer.attend(q, x, sinks, out, entries, choice)
        layer.keep()
        attention.turn(b, out, d, turn, first=d - self.rot, backwards=True)  # values are turned too
        return self._project(out, output)

    def _indexer_weights(self, il: int, n: int) -> tuple[Weight, Weight]:
        """What makes the indexer's queries (of the low-rank query) and their weights (of the layer's input)."""
        query = self.b.weight(f"blk.{il}.indexer.attn_q_b.weight", self.index_heads * self.index_width, self.q_rank)
        return query, self.b.weight(f"blk.{il}.indexer.proj.weight", self.index_heads, n)

    def _choose(self, il: int, layer: compressed.Layer, h: Rows, low: Rows, by: tuple[Weight, Weight]) -> compressed.Choice:
        b, width, (q_b, proj) = self.b, self.index_width, by
        keys = layer.compress(f"blk.{il}.indexer_compressor", "keys", h, width, self.hp.rms_epsilon, self.entry_positions)
        q, weights = b.rows("indexer query", q_b.num_rows, h.count), b.rows("indexer weights", self.index_heads, h.count)
        b.activations(low, [q_b])
        b.activations(h, [proj])
        b.matmul(q_b, low, q, barrier=False)
        b.matmul(proj, h, weights)
        attention.turn(b, q, width, self.long_turn, first=width - self.rot)
        return layer.choose(keys, q, weights, self.top)

    def _output_weights(self, il: int, n: int) -> tuple[Weight, Weight]:
        """attn_output_a as a tower, a matrix for each group of heads, and attn_output_b."""
        b, rank = self.b, self.out_rank
        rows = b.weight(f"blk.{il}.attn_output_a.weight", self.groups * rank, self.num_heads * self.d // self.groups)
        tower = replace(rows, num_rows=rank, slice_bytes=rank * rows.row_bytes)
        return tower, b.weight(f"blk.{il}.attn_output_b.weight", n, self.groups * rank)

    def _project(self, out: Rows, by: tuple[Weight, Weight]) -> Rows:
        """attn_output_b · (the groups' rows of attn_output_a · their heads, side by side)."""
        b, groups, (tower, up) = self.b, self.groups, by
        low, y = b.rows("low-rank output", up.k, out.count), b.rows("half-layer out", up.num_rows, out.count)
        latent.heads_product(b, tower, groups, out, tower.k, Heads(low, groups, tower.num_rows, tower.num_rows))
        b.matmul(up, low, y)
        return y


class _Experts:
    """The second half of every layer: routed experts beside a plain shared one, hidden units cut."""

    def __init__(self, b: Builder, hp: HyperParameters) -> None:
        self.b, self.hp = b, hp
        self.hash_layers = b.keys.integer("hash_layer_count", 0)
        self.limits = b.keys.numbers_per_layer("swiglu_clamp_exp", hp.block_count, 0.0)
        has_own = "deepseek4.swiglu_clamp_shexp" in b.model.kv
        self.shared_limits = b.keys.numbers_per_layer("swiglu_clamp_shexp", hp.block_count) if has_own else self.limits

    def compute(self, il: int, h: Rows) -> Rows:
        b, hp = self.b, self.hp
        y, table = b.rows("half-layer out", h.width, h.count), 0
        if il < self.hash_layers:
            name = f"blk.{il}.ffn_gate_tid2eid.weight"
            table = expert_ops.experts_by_token(b, name, hp.vocab_size, hp.top_k[il], hp.num_experts)
        b.clear(y)
        routes = decoder.route(b, hp, TRAITS, il, h, table)
        towers = expert_ops.towers(b, il, hp.num_experts, hp.expert_feed_forward_length[il], h.width)
        shared = decoder.SharedExpert(b, hp, TRAITS, il, h, y, activation=_activation(self.shared_limits[il]))
        expert_ops.experts(b, routes, h, towers, y, activation=_activation(self.limits[il]), meanwhile=shared.compute)
        return y


def _activation(limit: float) -> elementwise.Activation:
    return elementwise.Activation(elementwise.CUT_THEN_SILU, limit if limit > 1e-6 else math.inf)
