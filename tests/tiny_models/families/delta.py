"""Delta rules: one decay a head (qwen35, qwen35moe, qwen3next), and one a channel beside latent attention (kimi-linear, bailingmoe3)."""

from __future__ import annotations

from dataclasses import dataclass

from ..model import TinyModel
from .latent import Latent, latent_attention
from .parts import (
    Shape,
    dense,
    draft_head,
    ends,
    expert_keys,
    experts,
    family,
    head_keys,
    hybrid_keys,
    norm,
    projections,
    qk_norms,
    router,
    towers,
)

SECTIONS, SPLIT, FUSED = "rope in sections", "two matrices before the convolution", "one matrix before the convolution"


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """d: size of a head; heads of keys and of values; taps of the convolution."""

    d: int
    keys: int
    values: int
    taps: int


def gated_delta_net(
    m: TinyModel, size: int, *, moe: bool = True, form: str = SECTIONS, draft: bool = False, fused_towers: bool = False
) -> None:
    """Mostly delta rules, some layers of gated attention. Size 0 says which by an interval; size 1 by a list no interval makes, which
    wins over the interval beside it."""
    s = (
        Shape(n=256, layers=4, heads=4, kv=2, hd=32, ff=256, experts=8, top_k=2, ff_expert=256, ff_shared=128),
        Shape(n=96, layers=6, heads=6, kv=3, hd=48, ff=128, experts=7, top_k=3, ff_expert=64, ff_shared=96),
    )[size]
    delta = (DeltaNet(d=32, keys=2, values=4, taps=4), DeltaNet(d=16, keys=2, values=6, taps=3))[size]
    recurrent = ([True, True, True, False], [True, False, True, True, False, True])[size]
    blocks = s.layers + draft
    hybrid_keys(m, s.n, blocks, s.ff)
    head_keys(m, s.heads, s.kv, s.hd)
    m.keys(
        {
            "rope.dimension_count": s.hd // 2,
            "rope.freq_base": 10000.0,
            "rope.dimension_sections": ([3, 3, 2, 0], [4, 4, 4, 0])[size] if form == SECTIONS else None,
            "ssm.conv_kernel": delta.taps,
            "ssm.state_size": delta.d,
            "ssm.group_count": delta.keys,
            "ssm.time_step_rank": delta.values,
            "ssm.inner_size": delta.d * delta.values,
            "attention.recurrent_layers": (None, recurrent + [False] * draft)[size],
            "full_attention_interval": (4, 3)[size],
            "nextn_predict_layers": 1 if draft else None,
        }
    )
    if moe:
        expert_keys(m, s, s.ff_expert)
    m.vocabulary("gpt-2")
    ends(m, s.n)
    for il in range(blocks):
        b = f"blk.{il}."
        norm(m, b + "attn_norm", s.n)
        if il < s.layers and recurrent[il]:
            delta_layer(m, b, s.n, delta, form)
        else:
            # A gate value stands behind each value of a query.
            projections(m, b, s.n, 2 * s.heads * s.hd, s.kv * s.hd, s.kv * s.hd)
            qk_norms(m, b, s.hd, mean=1.0)
            m.matrix(b + "attn_output.weight", s.n, s.heads * s.hd)
        norm(m, b + "post_attention_norm", s.n)
        if moe:
            router(m, b, s.n, s.experts)
            towers(m, b, s.n, s.ff_expert, s.experts, parts=("gate_up",) if fused_towers else ("gate", "up"))
            dense(m, b, s.n, s.ff_shared, "_shexp")
            m.vector(b + "ffn_gate_inp_shexp.weight", s.n, std=1 / s.n**0.5)
        else:
            dense(m, b, s.n, s.ff)
        if il >= s.layers:
            draft_head(m, b, s.n)


def delta_layer(m: TinyModel, b: str, n: int, delta: DeltaNet, form: str) -> None:
    key, value = delta.d * delta.keys, delta.d * delta.values
    if form == FUSED:
        m.matrix(b + "ssm_in.weight", 2 * key + 2 * value, n)
    else:
        m.matrix(b + "attn_qkv.weight", 2 * key + value, n)
        m.matrix(b + "attn_gate.weight", value, n)
    m.vector(b + "ssm_conv1d.weight", 2 * key + value, delta.taps, std=0.5)
    m.uniform(b + "ssm_dt.bias", delta.values, low=-1, high=1)
    m.uniform(b + "ssm_a", delta.values, low=-1.0, high=-0.05)
    if form == SECTIONS:
        m.matrix(b + "ssm_beta.weight", delta.values, n)
        m.matrix(b + "ssm_alpha.weight", delta.values, n)
    else:
        m.matrix(b + "ssm_ba.weight", 2 * delta.values, n)
    norm(m, b + "ssm_norm", delta.d)
    m.matrix(b + "ssm_out.weight", n, value)


@family("qwen35")
def qwen35(m: TinyModel, size: int) -> None:
    gated_delta_net(m, size, moe=False)


@family("qwen35-nextn", "qwen35")
def qwen35_draft(m: TinyModel, size: int) -> None:
    gated_delta_net(m, size, moe=False, draft=True)


@family("qwen35moe")
def qwen35moe(m: TinyModel, size: int) -> None:
    gated_delta_net(m, size)


@family("qwen35moe-nextn", "qwen35moe")
def qwen35moe_draft(m: TinyModel, size: int) -> None:
    gated_delta_net(m, size, draft=True)


@family("qwen35moe-gateup", "qwen35moe")
def qwen35moe_fused_towers(m: TinyModel, size: int) -> None:
    gated_delta_net(m, size, fused_towers=True)


@family("qwen3next")
def qwen3next(m: TinyModel, size: int) -> None:
    gated_delta_net(m, size, form=SPLIT)


@family("qwen3next-fused", "qwen3next")
def qwen3next_fused(m: TinyModel, size: int) -> None:
    gated_delta_net(m, size, form=FUSED)


# -- one decay a channel
LATENT_LAYERS = ([False, False, False, True], [False, True, False, False, True, False])


def channel_delta_layer(m: TinyModel, b: str, n: int, heads: int, d: int, taps: int, *, low_rank: bool) -> None:
    """low_rank: decay and output gate come through d values (kimi-linear), and ssm_a holds the negative rate; else the rate's logarithm."""
    inner = heads * d
    projections(m, b, n, inner, inner, inner)
    for which in "qkv":
        m.vector(f"{b}ssm_conv1d_{which}.weight", 1, inner, 1, taps, std=0.5)
    if low_rank:
        for part in "fg":
            m.matrix(f"{b}ssm_{part}_a.weight", d, n)
            m.matrix(f"{b}ssm_{part}_b.weight", inner, d)
        m.uniform(b + "ssm_a", 1, 1, heads, 1, low=-1.0, high=-0.05)
        m.uniform(b + "ssm_dt.bias", inner, low=-2, high=1)
    else:
        for part in "fg":
            m.matrix(f"{b}ssm_{part}_a.weight", inner, n)
        m.uniform(b + "ssm_a", heads, 1, low=0.3, high=2.0)
        m.uniform(b + "ssm_dt.bias", inner, low=-3, high=0)
    m.matrix(b + "ssm_beta.weight", heads, n)
    norm(m, b + "ssm_norm", d)
    m.matrix(b + "attn_output.weight", n, inner)


@family("kimi-linear")
def kimi_linear(m: TinyModel, size: int) -> None:
    s = (
        Shape(n=128, layers=4, heads=4, kv=0, hd=32, ff=96, experts=8, top_k=2, ff_expert=32),
        Shape(n=96, layers=6, heads=3, kv=0, hd=16, ff=128, experts=9, top_k=3, ff_expert=64),
    )[size]
    a = (Latent(rank=64, still=32, turning=16, value=32), Latent(rank=32, still=64, turning=32, value=32))[size]
    taps, shared = ((4, 1), (3, 2))[size]
    latent_layers = LATENT_LAYERS[size]
    hybrid_keys(m, s.n, s.layers, s.ff, eps=1e-5)
    head_keys(m, s.heads, [int(on) for on in latent_layers], None)
    m.keys(
        {
            "attention.kv_lora_rank": a.rank,
            "attention.key_length": a.rank + a.turning,
            "attention.key_length_mla": a.query,
            "attention.value_length_mla": a.value,
            "rope.dimension_count": a.turning,
            "kda.head_dim": s.hd,
            "ssm.conv_kernel": taps,
            "leading_dense_block_count": 1,
        }
    )
    expert_keys(
        m, s, s.ff_expert, shared_count=shared, weights_scale=2.446, gating_func=2, group_count=(1, 3)[size], group_used_count=(1, 2)[size]
    )
    m.vocabulary("gpt-2")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norm(m, b + "attn_norm", s.n)
        if latent_layers[il]:
            latent_attention(m, b, s.n, s.heads, a)
        else:
            channel_delta_layer(m, b, s.n, s.heads, s.hd, taps, low_rank=True)
        norm(m, b + "ffn_norm", s.n)
        if il == 0:
            dense(m, b, s.n, s.ff)
        else:
            experts(m, b, s, down=1.0, bias=0.1)
            dense(m, b, s.n, s.ff_expert * shared, "_shexp")


@family("bailingmoe3")
def bailingmoe3(m: TinyModel, size: int) -> None:
    """Size 0 compresses queries; size 1 clamps the hidden values of experts."""
    s = (
        Shape(n=128, layers=4, heads=4, kv=0, hd=32, ff=96, experts=8, top_k=2, ff_expert=32, ff_shared=32),
        Shape(n=96, layers=6, heads=3, kv=0, hd=16, ff=128, experts=9, top_k=3, ff_expert=64, ff_shared=96),
    )[size]
    a = (Latent(q_rank=32, rank=64, still=32, turning=16, value=32), Latent(rank=32, still=64, turning=32, value=32))[size]
    taps = (4, 3)[size]
    latent_layers = LATENT_LAYERS[size]
    hybrid_keys(m, s.n, s.layers, s.ff)
    head_keys(m, s.heads, [int(on) for on in latent_layers], None)
    m.keys(
        {
            "attention.q_lora_rank": a.q_rank or None,
            "attention.kv_lora_rank": a.rank,
            "attention.key_length": a.rank + a.turning,
            "attention.value_length": a.rank,
            "attention.key_length_mla": a.query,
            "attention.value_length_mla": a.value,
            "rope.dimension_count": a.turning,
            "rope.freq_base": 10000.0,
            "kda.head_dim": s.hd,
            "kda.safe_gate": True,
            "kda.gate_lower_bound": -5.0,
            "ssm.conv_kernel": taps,
            "leading_dense_block_count": 1,
            "expert_count": s.experts,
            "expert_used_count": s.top_k,
            "expert_feed_forward_length": s.ff_expert,
            "expert_shared_feed_forward_length": s.ff_shared,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": (4, 3)[size],
            "expert_group_used_count": 2,
            "swiglu_clamp_exp": (None, [0.0] + [0.5] * (s.layers - 1))[size],
            "swiglu_clamp_shexp": (None, [0.0] + [0.4] * (s.layers - 1))[size],
        }
    )
    m.vocabulary("gpt-2")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norm(m, b + "attn_norm", s.n)
        if latent_layers[il]:
            latent_attention(m, b, s.n, s.heads, a)
            m.matrix(b + "attn_gate.weight", s.heads, s.n)
        else:
            channel_delta_layer(m, b, s.n, s.heads, s.hd, taps, low_rank=False)
        norm(m, b + "ffn_norm", s.n)
        if il == 0:
            dense(m, b, s.n, s.ff)
        else:
            experts(m, b, s, down=1.0, bias=0.1)
            dense(m, b, s.n, s.ff_shared, "_shexp")
