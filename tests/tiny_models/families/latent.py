"""Attention over one latent row a token: deepseek2 in its forms, and the part others mix in."""

from __future__ import annotations

from dataclasses import dataclass

from ..model import TinyModel
from .parts import Shape, dense, draft_head, ends, experts, family, head_keys, hybrid_keys, norm

TOWERS, ONE_MATRIX = "attn_k_b and attn_v_b", "attn_kv_b"


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Ranks of what queries (0: not at all) and keys are compressed to; values of a head that do not turn, that turn, and that it gives."""

    q_rank: int = 0
    rank: int
    still: int
    turning: int
    value: int

    @property
    def query(self) -> int:
        return self.still + self.turning


def latent_attention(m: TinyModel, b: str, n: int, heads: int, a: Latent, form: str = TOWERS) -> None:
    """All tensors of the mixer but its output matrix's gate. The two forms hold the same matrices, keys transposed."""
    if a.q_rank:
        m.matrix(b + "attn_q_a.weight", a.q_rank, n)
        norm(m, b + "attn_q_a_norm", a.q_rank)
        m.matrix(b + "attn_q_b.weight", heads * a.query, a.q_rank)
    else:
        m.matrix(b + "attn_q.weight", heads * a.query, n)
    m.matrix(b + "attn_kv_a_mqa.weight", a.rank + a.turning, n)
    norm(m, b + "attn_kv_a_norm", a.rank)
    if form == TOWERS:
        m.matrix(b + "attn_k_b.weight", heads, a.rank, a.still)
        m.matrix(b + "attn_v_b.weight", heads, a.value, a.rank)
    else:
        m.matrix(b + "attn_kv_b.weight", heads * (a.still + a.value), a.rank)
    m.matrix(b + "attn_output.weight", n, heads * a.value)


def deepseek2(m: TinyModel, size: int, *, lite: bool = False, form: str = TOWERS, draft: bool = False) -> None:
    """lite: queries are not compressed, the router is a softmax. draft: as GLM-4.7-Flash has it, one group of experts, rope not scaled,
    and one block appended. Lite in size 1 has 27 layers, for only with 26 or 27 llama.cpp does without q_lora_rank."""
    s = (
        Shape(n=256, layers=3, heads=4, kv=1, hd=0, ff=256, experts=8, top_k=2, ff_expert=256),
        Shape(n=96, layers=27 if lite else 5, heads=3, kv=1, hd=0, ff=64, experts=12, top_k=3, ff_expert=32),
    )[size]
    a = (
        Latent(q_rank=0 if lite else 64, rank=64, still=32, turning=16, value=32),
        Latent(q_rank=0 if lite else 32, rank=96, still=64, turning=32, value=32),
    )[size]
    dense_layers = shared = (1, 2)[size]
    blocks = s.layers + draft
    hybrid_keys(m, s.n, blocks, s.ff)
    m.keys({"leading_dense_block_count": dense_layers})
    latent_keys(m, s.heads, a, form)
    m.keys(
        {
            "attention.q_lora_rank": a.q_rank if a.q_rank or size == 0 else None,
            "attention.kv_lora_rank": a.rank,
            "rope.dimension_count": a.turning,
            "rope.freq_base": 10000.0,
            "expert_count": s.experts,
            "expert_used_count": s.top_k,
            "expert_shared_count": shared,
            "expert_feed_forward_length": s.ff_expert,
        }
    )
    if lite:
        # Size 0 leaves the gating function to its default.
        m.keys({"expert_gating_func": (None, 1)[size], "expert_weights_scale": (1.0, 2.0)[size]})
    else:
        m.keys(
            {
                "expert_gating_func": 2,
                "expert_weights_scale": 2.5,
                "expert_weights_norm": True,
                "expert_group_count": 1 if draft else (4, 3)[size],
                "expert_group_used_count": 1 if draft else 2,
            }
        )
    if draft:
        m.keys({"nextn_predict_layers": 1})
    else:
        m.keys(
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": (40.0, 8.0)[size],
                "rope.scaling.original_context_length": (4096, 512)[size],
                # Without it, the rotation grows as well as the scores.
                "rope.scaling.yarn_log_multiplier": 0.1 * (0.707 if lite else 1.0) if form == TOWERS or size == 0 else None,
            }
        )
    m.vocabulary("gpt-2")
    ends(m, s.n)
    for il in range(blocks):
        b = f"blk.{il}."
        norm(m, b + "attn_norm", s.n)
        latent_attention(m, b, s.n, s.heads, a, form)
        norm(m, b + "ffn_norm", s.n)
        if il < dense_layers:
            dense(m, b, s.n, s.ff)
        else:
            experts(m, b, s, down=1.0, bias=0.0 if lite else 0.1)
            dense(m, b, s.n, s.ff_expert * shared, "_shexp")
        if il >= s.layers:
            draft_head(m, b, s.n)


def latent_keys(m: TinyModel, heads: int, a: Latent, form: str) -> None:
    """As the cache sees a token: one row of latent and turned values; or, in the older form, a key and a value a head."""
    if form == TOWERS:
        head_keys(m, heads, 1, None)
        m.keys(
            {
                "attention.key_length": a.rank + a.turning,
                "attention.value_length": a.rank,
                "attention.key_length_mla": a.query,
                "attention.value_length_mla": a.value,
            }
        )
    else:
        head_keys(m, heads, heads, None)
        m.keys({"attention.key_length": a.query, "attention.value_length": a.value})


@family("deepseek2")
def deepseek2_full(m: TinyModel, size: int) -> None:
    deepseek2(m, size)


@family("deepseek2-kvb", "deepseek2")
def deepseek2_full_one_matrix(m: TinyModel, size: int) -> None:
    deepseek2(m, size, form=ONE_MATRIX)


@family("deepseek2-nextn", "deepseek2")
def deepseek2_draft(m: TinyModel, size: int) -> None:
    deepseek2(m, size, draft=True)


@family("deepseek2-lite", "deepseek2")
def deepseek2_lite(m: TinyModel, size: int) -> None:
    deepseek2(m, size, lite=True)


@family("deepseek2-lite-kvb", "deepseek2")
def deepseek2_lite_one_matrix(m: TinyModel, size: int) -> None:
    deepseek2(m, size, lite=True, form=ONE_MATRIX)
