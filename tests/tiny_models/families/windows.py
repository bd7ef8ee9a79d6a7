"""Attention in every layer with something of its own: a window, sinks, a temperature, layers that share keys: mistral3, gpt-oss, gemma4,
laguna."""

from __future__ import annotations

import numpy as np

from ..model import VOCAB, TinyModel
from .parts import (
    Shape,
    attention,
    common_keys,
    dense,
    ends,
    expert_keys,
    experts,
    family,
    head_keys,
    hybrid_keys,
    norm,
    norms,
    projections,
    qk_norms,
    router,
    towers,
)


@family("mistral3")
def mistral3(m: TinyModel, size: int) -> None:
    """The original context is so short that both temperature and yarn show within a prompt."""
    s = (Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=512), Shape(n=320, layers=3, heads=5, kv=1, hd=64, ff=288))[size]
    common_keys(m, s, s.ff, base=100000.0, rot=s.hd)
    m.keys(
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": (16.0, 4.0)[size],
            "rope.scaling.original_context_length": 8,
            "rope.scaling.yarn_beta_fast": (32.0, 4.0)[size],
            "rope.scaling.yarn_beta_slow": (1.0, 0.5)[size],
            "rope.scaling.yarn_log_multiplier": (1.0, 0.7)[size],
            "attention.temperature_scale": (0.1, 0.25)[size],
        }
    )
    m.vocabulary("llama-bpe")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s)
        dense(m, b, s.n, s.ff, down=2.0)


@family("gpt-oss")
def gpt_oss(m: TinyModel, size: int) -> None:
    """A window in every other layer, a sink a head, experts with biases."""
    s = (
        Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=256, experts=8, top_k=2),
        Shape(n=384, layers=4, heads=6, kv=2, hd=32, ff=192, experts=11, top_k=4),
    )[size]
    common_keys(m, s, s.ff, base=150000.0, eps=1e-5, rot=s.hd)
    expert_keys(m, s, s.ff)
    m.keys(
        {
            "attention.sliding_window": (8, 12)[size],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": (64, 128)[size],
        }
    )
    m.vocabulary("gpt-4o")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n, "post_attention_norm")
        attention(m, b, s, bias=True, out_bias=True)
        m.vector(b + "attn_sinks.weight", s.heads, std=1.0)
        experts(m, b, s)
        m.vector(b + "ffn_gate_inp.bias", s.experts, std=0.5)
        for part, rows in (("gate", s.ff), ("up", s.ff), ("down", s.n)):
            m.vector(f"{b}ffn_{part}_exps.bias", s.experts, rows, std=0.5)


# -- gemma4
@family("gemma4")
def gemma4(m: TinyModel, size: int) -> None:
    """Size 0: experts beside a dense part in every layer; full layers take their values from their keys. Size 1: embeddings a layer,
    and keys shared by the last layers. The last two layers with keys of their own are a sliding and a full one, in that order."""
    s = (
        Shape(n=256, layers=2, heads=4, kv=0, hd=128, ff=512, experts=8, top_k=2, ff_expert=256),
        Shape(n=192, layers=6, heads=6, kv=0, hd=64, ff=352, experts=9, top_k=4, ff_expert=96),
    )[size]
    slides = [il % 2 == 0 for il in range(s.layers)]
    hd_sliding = (64, 32)[size]
    kv = ([2, 1], [2] * s.layers)[size]
    sharing, side = ((0, 0), (2, 32))[size]  # layers that share keys; width of a layer's own embedding
    common_keys(m, s, s.ff, base=1e6, rot=s.hd, kv=kv)
    m.keys(
        {
            "attention.key_length_swa": hd_sliding,
            "attention.value_length_swa": hd_sliding,
            "rope.dimension_count_swa": hd_sliding,
            "rope.freq_base_swa": 10000.0,
            "attention.sliding_window": (8, 12)[size],
            "attention.sliding_window_pattern": slides,
            "attention.shared_kv_layers": sharing,
            "embedding_length_per_layer_input": side,
            "final_logit_softcapping": (30.0, 20.0)[size],
        }
    )
    expert_keys(m, s, s.ff_expert)
    m.vocabulary("default")
    m.weights("token_embd.weight", (VOCAB, s.n), 0.8 / s.n**0.5)
    norm(m, "output_norm", s.n, 4.0)
    # In full layers the first quarter of the pairs turns, and the rest stands still.
    m.floats("rope_freqs.weight", np.where(np.arange(s.hd // 2) < s.hd // 8, 1.0, 1e30))
    if side:
        m.weights("per_layer_token_embd.weight", (VOCAB, side * s.layers), 1 / side**0.5)
        m.weights("per_layer_model_proj.weight", (side * s.layers, s.n), 1.0)
        norm(m, "per_layer_proj_norm", side)
    for il in range(s.layers):
        b = f"blk.{il}."
        hd = hd_sliding if slides[il] else s.hd
        norms(m, b, s.n)
        norm(m, b + "post_attention_norm", s.n, 3.0)
        norm(m, b + "post_ffw_norm", s.n, 3.0)
        m.matrix(b + "attn_q.weight", s.heads * hd, s.n)
        if il < s.layers - sharing:
            m.matrix(b + "attn_k.weight", kv[il] * hd, s.n)
            norm(m, b + "attn_k_norm", hd, 0.35)
            if slides[il] or size == 1:
                m.matrix(b + "attn_v.weight", kv[il] * hd, s.n)
        norm(m, b + "attn_q_norm", hd, 0.6)
        m.matrix(b + "attn_output.weight", s.n, s.heads * hd)
        dense(m, b, s.n, s.ff, down=2.0)
        if size == 0 or il % 2 == 0:
            gemma4_experts(m, b, s, fused=size == 0)
        if side:
            m.matrix(b + "inp_gate.weight", side, s.n)
            m.matrix(b + "proj.weight", s.n, side)
            norm(m, b + "post_norm", s.n, 0.7)
        norm(m, b + "layer_output_scale", 1, 0.9)


def gemma4_experts(m: TinyModel, b: str, s: Shape, *, fused: bool) -> None:
    """The router's input is divided by sqrt(n), so its weights are louder by as much."""
    router(m, b, s.n, s.experts, gain=2.0 * s.n**0.5)
    m.vector(b + "ffn_gate_inp.scale", s.n, mean=1.0)
    for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        norm(m, b + name, s.n)
    towers(m, b, s.n, s.ff_expert, s.experts, parts=("gate_up",) if fused else ("gate", "up"))
    m.vector(b + "ffn_down_exps.scale", s.experts, mean=1.0)


# -- laguna
@family("laguna")
def laguna(m: TinyModel, size: int) -> None:
    """Full and sliding layers with other head counts, and a gate for every head."""
    laguna_model(m, size, full=([True, False, False, False], [True, False, True, False, False, True])[size], window=True)


@family("laguna-full", "laguna")
def laguna_full(m: TinyModel, size: int) -> None:
    """No window at all, and a gate for every element."""
    laguna_model(m, size, full=[True] * (4, 6)[size], window=False)


def laguna_model(m: TinyModel, size: int, full: list[bool], *, window: bool) -> None:
    s = (
        Shape(n=128, layers=4, heads=0, kv=2, hd=32, ff=96, experts=8, top_k=2, ff_expert=32, ff_shared=64),
        Shape(n=96, layers=6, heads=0, kv=3, hd=16, ff=128, experts=9, top_k=4, ff_expert=64, ff_shared=32),
    )[size]
    heads = [((4, 6) if on else (6, 9))[size] for on in full]
    dense_layers = (1, 2)[size]
    hybrid_keys(m, s.n, s.layers, s.ff)
    head_keys(m, heads, s.kv, s.hd)
    m.keys(
        {
            "rope.dimension_count": 16,
            "rope.freq_base": 500000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": (16.0, 4.0)[size],
            "rope.scaling.original_context_length": (256, 512)[size],
            # Converters write these two, and nothing reads them for this architecture.
            "rope.scaling.yarn_beta_fast": 64.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        }
    )
    if window:
        m.keys(
            {
                "attention.sliding_window": (16, 12)[size],
                "rope.freq_base_swa": 10000.0,
                "rope.dimension_count_swa": (32, 16)[size],
                "attention.sliding_window_pattern": (None, [not on for on in full])[size],
            }
        )
    m.keys({"leading_dense_block_count": dense_layers})
    expert_keys(m, s, s.ff_expert, weights_norm=True, weights_scale=2.5, gating_func=2)
    m.vocabulary("gpt-2")
    ends(m, s.n)
    for il in range(s.layers):
        b, q = f"blk.{il}.", heads[il] * s.hd
        norm(m, b + "attn_norm", s.n)
        projections(m, b, s.n, q, s.kv * s.hd, s.kv * s.hd)
        qk_norms(m, b, s.hd, mean=1.0)
        m.matrix(b + "attn_gate.weight", heads[il] if window else q, s.n)
        m.matrix(b + "attn_output.weight", s.n, q)
        norm(m, b + "ffn_norm", s.n)
        if il < dense_layers:
            dense(m, b, s.n, s.ff)
        else:
            experts(m, b, s, bias=0.1, down=1.0)
            dense(m, b, s.n, s.ff_shared, "_shexp")
