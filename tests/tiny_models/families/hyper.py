"""deepseek4: several residual streams, one head of keys seen through a window and in compressed blocks, experts by token."""

from __future__ import annotations

from ..model import VOCAB, TinyModel
from .parts import Shape, dense, ends, family, head_keys, hybrid_keys, norm, router, towers

STREAMS = 4


@family("deepseek4")
def deepseek4(m: TinyModel, size: int) -> None:
    """Blocks of 4 and of 128 tokens are compressed, so it wants a long prompt. With few indexer heads every product could be negative,
    and blocks would tie at 0."""
    s = (
        Shape(n=64, layers=4, heads=4, kv=1, hd=64, ff=32, experts=8, top_k=2),
        Shape(n=96, layers=5, heads=6, kv=1, hd=32, ff=64, experts=7, top_k=3),
    )[size]
    ratios = ([0, 0, 4, 128], [4, 128, 0, 4, 128])[size]
    q_rank, groups, out_rank = ((64, 2, 32), (32, 3, 64))[size]
    index_heads, index_length = ((24, 64), (32, 128))[size]
    by_token, shared = ((1, 1), (2, 2))[size]
    hybrid_keys(m, s.n, s.layers, s.ff)
    head_keys(m, s.heads, s.kv, s.hd)
    m.keys(
        {
            "attention.q_lora_rank": q_rank,
            "attention.sliding_window": (16, 12)[size],
            "attention.output_group_count": groups,
            "attention.output_lora_rank": out_rank,
            "attention.compress_ratios": ratios,
            "attention.compress_rope_freq_base": 160000.0,
            "attention.indexer.head_count": index_heads,
            "attention.indexer.key_length": index_length,
            "attention.indexer.top_k": (4, 7)[size],
            "rope.dimension_count": s.hd // 2,
            "rope.freq_base": 10000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 1024,
            "hyper_connection.count": STREAMS,
            "hyper_connection.sinkhorn_iterations": (3, 5)[size],
            "hyper_connection.epsilon": 1e-6,
            "hash_layer_count": by_token,
            "expert_count": s.experts,
            "expert_used_count": s.top_k,
            "expert_shared_count": shared,
            "expert_feed_forward_length": s.ff,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 4,
            # Low enough to bite; real models have 10.
            "swiglu_clamp_exp": [1.0] * s.layers,
            "swiglu_clamp_shexp": [0.8] * s.layers,
        }
    )
    m.vocabulary("gpt-2")
    ends(m, s.n)
    mixing(m, "output_hc", s.n, STREAMS, 1)
    for il, ratio in enumerate(ratios):
        b = f"blk.{il}."
        norm(m, b + "attn_norm", s.n)
        m.vector(b + "attn_sinks.weight", s.heads, std=1.0)
        m.matrix(b + "attn_q_a.weight", q_rank, s.n)
        norm(m, b + "attn_q_a_norm", q_rank)
        m.matrix(b + "attn_q_b.weight", s.heads * s.hd, q_rank)
        m.matrix(b + "attn_kv.weight", s.hd, s.n)
        norm(m, b + "attn_kv_a_norm", s.hd)
        m.matrix(b + "attn_output_a.weight", groups * out_rank, s.heads * s.hd // groups)
        m.matrix(b + "attn_output_b.weight", s.n, groups * out_rank)
        for part in ("attn", "ffn"):
            mixing(m, f"{b}hc_{part}", s.n, (2 + STREAMS) * STREAMS, 3)
        if ratio:
            compressor(m, b + "attn_compressor", s.n, s.hd, ratio)
        if ratio == 4:
            compressor(m, b + "indexer_compressor", s.n, index_length, ratio)
            m.matrix(b + "indexer.proj.weight", index_heads, s.n)
            m.matrix(b + "indexer.attn_q_b.weight", index_heads * index_length, q_rank)
        norm(m, b + "ffn_norm", s.n)
        if il < by_token:
            router(m, b, s.n, s.experts)
            m.choices(b + "ffn_gate_tid2eid.weight", VOCAB, s.experts, s.top_k)
        else:
            router(m, b, s.n, s.experts, bias=0.1)
        towers(m, b, s.n, s.ff, s.experts)
        dense(m, b, s.n, s.ff * shared, "_shexp")


def mixing(m: TinyModel, name: str, n: int, rows: int, scales: int) -> None:
    """How the streams meet: a matrix over all of them, its biases and scales."""
    m.matrix(f"{name}_fn.weight", rows, STREAMS * n, encoding="F32")
    m.vector(f"{name}_base.weight", rows, std=0.5)
    m.vector(f"{name}_scale.weight", scales, mean=1.0)


def compressor(m: TinyModel, name: str, n: int, length: int, ratio: int) -> None:
    """Blocks of 4 overlap: each has rows for itself and for the next one."""
    rows = 2 * length if ratio == 4 else length
    m.matrix(f"{name}_kv.weight", rows, n)
    m.matrix(f"{name}_gate.weight", rows, n)
    m.vector(f"{name}_ape.weight", ratio, rows, std=0.5)
    norm(m, f"{name}_norm", length)
