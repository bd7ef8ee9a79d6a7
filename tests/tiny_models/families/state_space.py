"""State spaces and short convolutions beside attention: nemotron_h, granitehybrid (second generation), jamba (first), lfm2moe."""

from __future__ import annotations

from dataclasses import dataclass

from ..model import VOCAB, TinyModel
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

MIXER, ATTENTION, FEED_FORWARD, EXPERTS, DRAFT = "M*-E+"


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """taps of the convolution, inner width, values of state a channel; heads and groups in the second generation, a rank in the first."""

    taps: int
    inner: int
    state: int
    heads: int
    groups: int = 0


def state_space_keys(m: TinyModel, x: StateSpace) -> None:
    m.keys(
        {
            "ssm.conv_kernel": x.taps,
            "ssm.inner_size": x.inner,
            "ssm.state_size": x.state,
            "ssm.time_step_rank": x.heads,
            "ssm.group_count": x.groups or None,
        }
    )


def mamba2_layer(m: TinyModel, b: str, n: int, x: StateSpace) -> None:
    channels = x.inner + 2 * x.groups * x.state
    m.matrix(b + "ssm_in.weight", x.inner + channels + x.heads, n)
    m.vector(b + "ssm_conv1d.weight", channels, x.taps, std=0.5)
    m.vector(b + "ssm_conv1d.bias", channels)
    m.uniform(b + "ssm_dt.bias", x.heads, low=-2, high=1)
    m.uniform(b + "ssm_a", x.heads, 1, low=-1.0, high=-0.05)
    m.uniform(b + "ssm_d", x.heads, 1, low=0.2, high=1.2)
    m.vector(b + "ssm_norm.weight", x.groups, x.inner // x.groups, mean=1.0, std=0.2)
    m.matrix(b + "ssm_out.weight", n, x.inner)


def plain_attention(m: TinyModel, b: str, s: Shape) -> None:
    projections(m, b, s.n, s.heads * s.hd, s.kv * s.hd, s.kv * s.hd)
    m.matrix(b + "attn_output.weight", s.n, s.heads * s.hd)


# -- nemotron_h
def nemotron_h(m: TinyModel, size: int, pattern: str, *, puzzle: bool = False) -> None:
    """One thing a layer, as the pattern says. puzzle: each layer of experts has its own width and number of chosen ones. Experts of size 1
    and of puzzles work in a narrower space."""
    s = (
        Shape(n=256, layers=len(pattern), heads=4, kv=2, hd=32, ff=256, experts=8, top_k=2, ff_expert=256, ff_shared=128),
        Shape(n=96, layers=len(pattern), heads=6, kv=2, hd=16, ff=128, experts=9, top_k=4, ff_expert=64, ff_shared=96),
    )[size]
    x = (
        StateSpace(taps=4, inner=128, state=16, heads=4, groups=2),
        StateSpace(taps=3, inner=192, state=32, heads=6, groups=3),
    )[size]
    moe = EXPERTS in pattern
    narrow = 32 if puzzle else (0, 32)[size]
    chosen, widths = [s.top_k] * s.layers, [s.ff_expert if moe else s.ff] * s.layers
    if puzzle:
        chosen, widths = [0] * s.layers, [0] * s.layers
        for nth, il in enumerate(il for il, kind in enumerate(pattern) if kind == EXPERTS):
            chosen[il], widths[il] = 1 + nth, 32 * (1 + nth % 3)
    hybrid_keys(m, s.n, s.layers, [w if kind in "-E+" else 0 for kind, w in zip(pattern, widths, strict=True)], eps=1e-5)
    m.keys({"attention.layer_norm_epsilon": 1e-5})
    head_keys(m, s.heads, [s.kv if kind in "*+" else 0 for kind in pattern], s.hd)
    state_space_keys(m, x)
    if moe:
        m.keys(
            {
                "expert_count": s.experts,
                "expert_used_count": chosen if puzzle else s.top_k,
                "expert_feed_forward_length": widths if puzzle else s.ff_expert,
                "expert_shared_feed_forward_length": s.ff_shared,
                "expert_shared_count": 1,
                "expert_weights_norm": True,
                "expert_weights_scale": 2.5,
                "expert_group_count": 1,
                "expert_group_used_count": 1,
                "moe_latent_size": narrow or None,
            }
        )
    m.keys({"nextn_predict_layers": 1 if DRAFT in pattern else None})
    m.vocabulary("gpt-2")
    ends(m, s.n)
    for il, kind in enumerate(pattern):
        b = f"blk.{il}."
        norm(m, b + "attn_norm", s.n)
        if kind == MIXER:
            mamba2_layer(m, b, s.n, x)
        if kind in (ATTENTION, DRAFT):
            plain_attention(m, b, s)
        if kind == FEED_FORWARD:
            dense(m, b, s.n, s.ff, gate=False)
        if kind in (EXPERTS, DRAFT):
            nemotron_h_experts(m, b, s, widths[il], narrow)
        if kind == DRAFT:
            norm(m, b + "post_attention_norm", s.n)
            draft_head(m, b, s.n)


def nemotron_h_experts(m: TinyModel, b: str, s: Shape, width: int, narrow: int) -> None:
    router(m, b, s.n, s.experts, bias=0.1)
    towers(m, b, narrow or s.n, width, s.experts, parts=("up",))
    if narrow:
        m.matrix(b + "ffn_latent_down.weight", narrow, s.n)
        m.matrix(b + "ffn_latent_up.weight", s.n, narrow)
    dense(m, b, s.n, s.ff_shared, "_shexp", gate=False)


@family("nemotron_h")
def nemotron_h_dense(m: TinyModel, size: int) -> None:
    nemotron_h(m, size, ("M-M*-", "MM-*M-*-M")[size])


@family("nemotron_h_moe")
def nemotron_h_moe(m: TinyModel, size: int) -> None:
    nemotron_h(m, size, ("MEM*E", "MEM*EM*EE")[size])


@family("nemotron_h_moe-puzzle", "nemotron_h_moe")
def nemotron_h_puzzle(m: TinyModel, size: int) -> None:
    nemotron_h(m, size, ("MEM*E", "MEM*EM*EE")[size], puzzle=True)


@family("nemotron_h_moe-nextn", "nemotron_h_moe")
def nemotron_h_draft(m: TinyModel, size: int) -> None:
    nemotron_h(m, size, ("MEM*E+", "MEM*EM*EE+")[size])


# -- granitehybrid
@family("granitehybrid")
def granitehybrid(m: TinyModel, size: int) -> None:
    """Size 0 has a shared expert and does not turn; size 1 turns."""
    pattern = ("MM*M", "M*MM*")[size]
    s = (
        Shape(n=64, layers=4, heads=4, kv=2, hd=16, ff=32, experts=8, top_k=2, ff_shared=64),
        Shape(n=96, layers=5, heads=3, kv=1, hd=32, ff=64, experts=5, top_k=3),
    )[size]
    x = (
        StateSpace(taps=4, inner=128, state=16, heads=4, groups=1),
        StateSpace(taps=3, inner=192, state=32, heads=6, groups=3),
    )[size]
    hybrid_keys(m, s.n, s.layers, s.ff, eps=1e-5)
    head_keys(m, s.heads, [s.kv if kind == ATTENTION else 0 for kind in pattern], None)
    m.keys(
        {
            "embedding_scale": 3.0,
            "residual_scale": 0.5,
            "attention.scale": (0.2, 0.3)[size],
            "logit_scale": 2.0,
            "rope.scaling.finetuned": size == 1,
            "rope.dimension_count": (None, s.hd)[size],
            "rope.freq_base": (None, 10000.0)[size],
        }
    )
    state_space_keys(m, x)
    expert_keys(m, s)
    m.vocabulary("gpt-2")
    ends(m, s.n)
    for il, kind in enumerate(pattern):
        b = f"blk.{il}."
        norm(m, b + "attn_norm", s.n)
        if kind == MIXER:
            mamba2_layer(m, b, s.n, x)
        else:
            plain_attention(m, b, s)
        norm(m, b + "ffn_norm", s.n)
        experts(m, b, s, down=1.0)
        if s.ff_shared:
            dense(m, b, s.n, s.ff_shared, "_shexp")


# -- jamba and lfm2moe
ATTENTION_LAYERS = ([False, False, True, False], [False, True, False, False, True])


@family("jamba")
def jamba(m: TinyModel, size: int) -> None:
    """Every other layer has experts; only the presence of a router says so."""
    s = (
        Shape(n=64, layers=4, heads=4, kv=2, hd=16, ff=64, experts=8, top_k=2),
        Shape(n=96, layers=5, heads=6, kv=3, hd=16, ff=96, experts=5, top_k=2),
    )[size]
    x = (StateSpace(taps=4, inner=128, state=16, heads=32), StateSpace(taps=3, inner=192, state=8, heads=32))[size]
    attends = ATTENTION_LAYERS[size]
    hybrid_keys(m, s.n, s.layers, s.ff)
    head_keys(m, s.heads, [s.kv if on else 0 for on in attends], None)
    state_space_keys(m, x)
    expert_keys(m, s)
    m.vocabulary("gpt-2")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norm(m, b + "attn_norm", s.n)
        if attends[il]:
            plain_attention(m, b, s)
        else:
            mamba_layer(m, b, s.n, x)
        norm(m, b + "ffn_norm", s.n)
        if il % 2:
            experts(m, b, s, down=1.0)
        else:
            dense(m, b, s.n, s.ff)


def mamba_layer(m: TinyModel, b: str, n: int, x: StateSpace) -> None:
    """The first generation: `heads` is the rank that time steps are made from, and every channel has decays of its own."""
    m.matrix(b + "ssm_in.weight", 2 * x.inner, n)
    m.vector(b + "ssm_conv1d.weight", x.inner, x.taps, std=0.5)
    m.vector(b + "ssm_conv1d.bias", x.inner)
    m.matrix(b + "ssm_x.weight", x.heads + 2 * x.state, x.inner)
    for part, width in (("dt", x.heads), ("b", x.state), ("c", x.state)):
        norm(m, f"{b}ssm_{part}_norm", width)
    m.matrix(b + "ssm_dt.weight", x.inner, x.heads)
    m.uniform(b + "ssm_dt.bias", x.inner, low=-2, high=1)
    m.uniform(b + "ssm_a", x.inner, x.state, low=-2.0, high=-0.05)
    m.uniform(b + "ssm_d", x.inner, low=0.2, high=1.2)
    m.matrix(b + "ssm_out.weight", n, x.inner)


@family("lfm2moe")
def lfm2moe(m: TinyModel, size: int) -> None:
    """A tied head, and the last norm under another name."""
    s = (
        Shape(n=64, layers=4, heads=4, kv=2, hd=16, ff=96, experts=8, top_k=2, ff_expert=32),
        Shape(n=96, layers=5, heads=6, kv=3, hd=16, ff=128, experts=7, top_k=3, ff_expert=64),
    )[size]
    taps, dense_layers = ((3, 1), (4, 2))[size]
    attends = ATTENTION_LAYERS[size]
    hybrid_keys(m, s.n, s.layers, s.ff, eps=1e-5)
    head_keys(m, s.heads, [s.kv if on else 0 for on in attends], None)
    m.keys({"rope.freq_base": 1000000.0, "shortconv.l_cache": taps, "leading_dense_block_count": dense_layers})
    expert_keys(m, s, s.ff_expert, gating_func=2)
    m.vocabulary("gpt-2")
    m.weights("token_embd.weight", (VOCAB, s.n), 0.3)
    norm(m, "token_embd_norm", s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norm(m, b + "attn_norm", s.n)
        if attends[il]:
            projections(m, b, s.n, s.n, s.kv * s.hd, s.kv * s.hd)
            qk_norms(m, b, s.hd, mean=1.0)
            m.matrix(b + "attn_output.weight", s.n, s.n)
        else:
            m.vector(b + "shortconv.conv.weight", s.n, taps, std=0.6)
            m.matrix(b + "shortconv.in_proj.weight", 3 * s.n, s.n)
            m.matrix(b + "shortconv.out_proj.weight", s.n, s.n)
        norm(m, b + "ffn_norm", s.n)
        if il < dense_layers:
            dense(m, b, s.n, s.ff)
        else:
            experts(m, b, s, down=1.0, bias=0.1)
