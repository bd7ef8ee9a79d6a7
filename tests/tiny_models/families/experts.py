"""Attention in every layer, and routers of many kinds: granitemoe, glm4moe, minimax-m2, dots1, ernie4_5-moe, bailingmoe2."""

from __future__ import annotations

from ..model import VOCAB, TinyModel
from .parts import Shape, attention, common_keys, dense, draft_head, ends, expert_keys, experts, family, norm, norms, qk_norms


@family("granitemoe")
def granitemoe(m: TinyModel, size: int) -> None:
    """Four scalars of its own. Size 0 has a tied head, size 1 a shared expert."""
    s = (
        Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=256, experts=8, top_k=2),
        Shape(n=320, layers=3, heads=5, kv=1, hd=64, ff=160, experts=9, top_k=4, ff_shared=224),
    )[size]
    common_keys(m, s, s.ff, lengths=False, rot=s.hd)
    expert_keys(m, s)
    m.keys(
        {
            "embedding_scale": (1.5, 12.0)[size],
            "residual_scale": (0.7, 0.22)[size],
            "attention.scale": (0.0625, 0.015625)[size],
            "logit_scale": (0.8, 6.0)[size],
        }
    )
    m.vocabulary("refact")
    if size == 0:
        ends(m, s.n, tied=True)
    else:
        m.weights("token_embd.weight", (VOCAB, s.n), 0.08)
        norm(m, "output_norm", s.n)
        m.matrix("output.weight", VOCAB, s.n, gain=18.0)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s, qk_gain=2.5, out=5.0)
        experts(m, b, s, down=8.0)
        if s.ff_shared:
            dense(m, b, s.n, s.ff_shared, "_shexp", down=4.0)


@family("glm4moe")
def glm4moe(m: TinyModel, size: int) -> None:
    """A dense layer first, half of each head turned, a shared expert. Size 0 norms queries and keys; size 1 has a draft head at its end."""
    s = (
        Shape(n=256, layers=3, heads=4, kv=2, hd=64, ff=512, experts=8, top_k=2, ff_expert=256),
        Shape(n=320, layers=3, heads=6, kv=2, hd=64, ff=416, experts=10, top_k=3, ff_expert=96),
    )[size]
    drafts, shared = ((0, 1), (1, 2))[size]
    common_keys(m, s, s.ff, base=1e6, eps=1e-5, rot=s.hd // 2, extra_blocks=drafts)
    expert_keys(m, s, s.ff_expert, shared_count=shared, weights_scale=(1.0, 2.5)[size], weights_norm=True, gating_func=2)
    m.keys({"leading_dense_block_count": 1, "nextn_predict_layers": drafts or None})
    m.vocabulary("glm4")
    ends(m, s.n)
    for il in range(s.layers + drafts):
        b = f"blk.{il}."
        norms(m, b, s.n, "post_attention_norm")
        attention(m, b, s, bias=True)
        if size == 0:
            qk_norms(m, b, s.hd)
        if il == 0:
            dense(m, b, s.n, s.ff, down=2.0)
        else:
            experts(m, b, s, bias=0.2)
            dense(m, b, s.n, s.ff_expert * shared, "_shexp", down=2.0)
        if il >= s.layers:
            draft_head(m, b, s.n)


@family("minimax-m2")
def minimax_m2(m: TinyModel, size: int) -> None:
    """Norms over the whole row of queries and of keys, part of each head turned."""
    s = (
        Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=256, experts=8, top_k=2),
        Shape(n=192, layers=3, heads=6, kv=2, hd=64, ff=96, experts=15, top_k=6),
    )[size]
    common_keys(m, s, s.ff, base=5e6, rot=(32, 48)[size])
    expert_keys(m, s, s.ff, gating_func=2)
    m.vocabulary("minimax-m2")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s)
        qk_norms(m, b, s.heads * s.hd, s.kv * s.hd)
        experts(m, b, s, bias=0.2)


@family("dots1")
def dots1(m: TinyModel, size: int) -> None:
    """A dense layer first. Size 1 neither steers the choice by a bias nor normalizes the weights."""
    s = (
        Shape(n=256, layers=3, heads=4, kv=4, hd=64, ff=512, experts=8, top_k=2, ff_expert=256),
        Shape(n=192, layers=3, heads=3, kv=3, hd=32, ff=352, experts=14, top_k=5, ff_expert=96),
    )[size]
    shared = (2, 1)[size]
    common_keys(m, s, s.ff, base=1e6)
    expert_keys(m, s, s.ff_expert, shared_count=shared, weights_scale=2.5, weights_norm=size == 0, gating_func=2)
    m.keys({"leading_dense_block_count": 1})
    m.vocabulary("qwen2")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s)
        qk_norms(m, b, s.hd)
        if il == 0:
            dense(m, b, s.n, s.ff, down=2.0)
        else:
            experts(m, b, s, bias=(0.2, 0.0)[size])
            dense(m, b, s.n, s.ff_expert * shared, "_shexp", down=2.0)


@family("ernie4_5-moe")
def ernie4_5_moe(m: TinyModel, size: int) -> None:
    """A dense layer first, a softmax with a bias for the choice. Size 1 has no shared expert."""
    s = (
        Shape(n=256, layers=3, heads=4, kv=2, hd=64, ff=512, experts=8, top_k=2, ff_expert=256, ff_shared=512),
        Shape(n=192, layers=3, heads=6, kv=3, hd=32, ff=352, experts=12, top_k=5, ff_expert=96),
    )[size]
    common_keys(m, s, s.ff, base=500000.0, eps=1e-5)
    expert_keys(m, s, s.ff_expert)
    m.keys({"leading_dense_block_count": 1, "interleave_moe_layer_step": 1})
    m.vocabulary("default")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s)
        if il == 0:
            dense(m, b, s.n, s.ff, down=2.0)
        else:
            experts(m, b, s, bias=0.1)
            if s.ff_shared:
                dense(m, b, s.n, s.ff_shared, "_shexp", down=2.0)


@family("bailingmoe2")
def bailingmoe2(m: TinyModel, size: int) -> None:
    """One matrix for queries, keys and values; experts chosen within the best groups. Size 1 names a shared expert's width."""
    s = (
        Shape(n=256, layers=3, heads=4, kv=2, hd=64, ff=512, experts=12, top_k=3, ff_expert=256),
        Shape(n=192, layers=3, heads=6, kv=2, hd=32, ff=352, experts=15, top_k=4, ff_expert=96, ff_shared=64),
    )[size]
    shared = (1, 2)[size]
    common_keys(m, s, s.ff, base=600000.0, rot=s.hd // 2)
    expert_keys(m, s, s.ff_expert, shared_count=shared, weights_scale=2.5, weights_norm=True, gating_func=2)
    m.keys({"leading_dense_block_count": 1, "expert_group_count": (4, 5)[size], "expert_group_used_count": 2})
    m.vocabulary("bailingmoe2")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        m.matrix(b + "attn_qkv.weight", (s.heads + 2 * s.kv) * s.hd, s.n, gain=1.3)
        m.matrix(b + "attn_output.weight", s.n, s.heads * s.hd, gain=1.5)
        qk_norms(m, b, s.hd)
        if il == 0:
            dense(m, b, s.n, s.ff, down=2.0)
        else:
            experts(m, b, s, bias=0.2)
            dense(m, b, s.n, (s.ff_shared or s.ff_expert) * shared, "_shexp", down=2.0)
