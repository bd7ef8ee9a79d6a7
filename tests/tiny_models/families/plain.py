"""Attention in every layer, dense or with experts, nothing unusual: llama, qwen, olmoe."""

from __future__ import annotations

import numpy as np

from ..model import VOCAB, TinyModel
from .parts import Shape, attention, common_keys, dense, ends, expert_keys, experts, family, norms, qk_norms


# -- llama
@family("llama")
def llama(m: TinyModel, size: int) -> None:
    """Size 1: every bias there is, and heads that do not add up to the width."""
    s = (Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=512), Shape(n=320, layers=3, heads=6, kv=3, hd=32, ff=352))[size]
    biases = size == 1
    common_keys(m, s, s.ff, base=10000.0, rot=s.hd)
    m.keys({"vocab_size": VOCAB})
    m.vocabulary("llama-bpe")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s, bias=biases, out_bias=biases)
        dense(m, b, s.n, s.ff, down=2.0, bias=biases)


@family("llama_moe", "llama")
def llama_moe(m: TinyModel, size: int) -> None:
    """Mixtral's form. Size 0 leaves the head's length out, size 1 scales rope linearly."""
    s = (
        Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=256, experts=8, top_k=2),
        Shape(n=384, layers=3, heads=6, kv=2, hd=64, ff=160, experts=7, top_k=3),
    )[size]
    common_keys(m, s, s.ff, base=1e6, lengths=size == 1, rot=s.hd)
    expert_keys(m, s)
    if size == 1:
        m.keys({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    m.vocabulary("llama-bpe")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s)
        experts(m, b, s)


@family("llama_yarn", "llama")
def llama_yarn(m: TinyModel, size: int) -> None:
    s = (Shape(n=256, layers=2, heads=4, kv=1, hd=64, ff=512), Shape(n=256, layers=3, heads=4, kv=2, hd=96, ff=384))[size]
    common_keys(m, s, s.ff, base=(10000.0, 500000.0)[size], rot=s.hd)
    m.keys(
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": (4.0, 16.0)[size],
            "rope.scaling.original_context_length": (128, 64)[size],
            "rope.scaling.attn_factor": (None, 0.9)[size],
        }
    )
    m.vocabulary("llama-bpe")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s)
        dense(m, b, s.n, s.ff, down=2.0)


@family("llama_rope_freqs", "llama")
def llama_rope_freqs(m: TinyModel, size: int) -> None:
    """Llama 3.1's rope factors, as a tensor. Size 0 has a tied head."""
    s = (Shape(n=256, layers=2, heads=8, kv=2, hd=32, ff=512), Shape(n=288, layers=3, heads=3, kv=1, hd=96, ff=320))[size]
    common_keys(m, s, s.ff, base=500000.0, rot=s.hd)
    m.vocabulary("llama-bpe")
    ends(m, s.n, tied=size == 0)
    m.floats("rope_freqs.weight", llama3_factors(s.hd, 500000.0, (8.0, 32.0)[size], (16, 32)[size]))
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s, out=(3.0, 1.5)[size])
        dense(m, b, s.n, s.ff, down=(6.0, 2.0)[size])


def llama3_factors(hd: int, base: float, factor: float, context: int) -> np.ndarray:
    """1 for fast frequencies, `factor` for slow ones, a ramp between them; the context is tiny, so that all three occur."""
    wavelength = 2 * np.pi * base ** (np.arange(0, hd, 2) / hd)
    fast = np.clip((context / wavelength - 1.0) / (4.0 - 1.0), 0, 1)
    return 1 / ((1 - fast) / factor + fast)


# -- qwen
@family("qwen2")
def qwen2(m: TinyModel, size: int) -> None:
    s = (Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=512), Shape(n=192, layers=3, heads=6, kv=1, hd=32, ff=352))[size]
    common_keys(m, s, s.ff, base=1e6, lengths=False)
    m.vocabulary("qwen2")
    ends(m, s.n, tied=size == 1)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s, bias=True, out=(1.5, 3.0)[size])
        dense(m, b, s.n, s.ff, down=(2.0, 6.0)[size])


@family("qwen3")
def qwen3(m: TinyModel, size: int) -> None:
    s = (Shape(n=256, layers=2, heads=4, kv=2, hd=128, ff=512), Shape(n=192, layers=3, heads=6, kv=3, hd=64, ff=416))[size]
    common_keys(m, s, s.ff, base=1e6)
    m.vocabulary("qwen2")
    ends(m, s.n, tied=size == 0)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s, out=(3.0, 1.5)[size])
        qk_norms(m, b, s.hd)
        dense(m, b, s.n, s.ff, down=(6.0, 2.0)[size])


@family("qwen2moe")
def qwen2moe(m: TinyModel, size: int) -> None:
    """A shared expert behind a gate of its own."""
    s = (
        Shape(n=256, layers=2, heads=4, kv=4, hd=64, ff=256, experts=8, top_k=2, ff_shared=512),
        Shape(n=192, layers=3, heads=6, kv=2, hd=32, ff=96, experts=15, top_k=4, ff_shared=224),
    )[size]
    common_keys(m, s, 2 * s.ff, base=1e6, lengths=False)
    expert_keys(m, s, s.ff)
    m.vocabulary("qwen2")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s, bias=True)
        experts(m, b, s)
        m.vector(b + "ffn_gate_inp_shexp.weight", s.n, std=1.5 / s.n**0.5)
        dense(m, b, s.n, s.ff_shared, "_shexp", down=2.0)


@family("qwen3moe")
def qwen3moe(m: TinyModel, size: int) -> None:
    """Size 1 in NVFP4 carries a second scale beside the blocks: one a matrix, one an expert in towers."""
    s = (
        Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=256, experts=8, top_k=2),
        Shape(n=512, layers=3, heads=6, kv=2, hd=32, ff=256, experts=13, top_k=5),
    )[size]
    common_keys(m, s, 2 * s.ff, base=1e6)
    expert_keys(m, s, s.ff)
    m.vocabulary("qwen2")
    ends(m, s.n)
    scaled = m.dtype == "NVFP4" and size == 1
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s)
        qk_norms(m, b, s.hd)
        experts(m, b, s)
        if scaled:
            for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
                m.vector(f"{b}{name}.scale", 1, mean=0.9)
            for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
                m.vector(f"{b}{name}.scale", s.experts, mean=0.9)
    if scaled:
        m.vector("output.scale", 1, mean=0.9)


@family("qwen3moe-extremes", "qwen3moe")
def qwen3moe_extremes(m: TinyModel, size: int) -> None:
    """Size 0: 512 narrow experts. Size 1: every expert is chosen."""
    s = (
        Shape(n=64, layers=2, heads=4, kv=2, hd=32, ff=32, experts=512, top_k=10),
        Shape(n=96, layers=2, heads=2, kv=1, hd=32, ff=64, experts=7, top_k=7),
    )[size]
    common_keys(m, s, 2 * s.ff, base=1e6)
    expert_keys(m, s, s.ff)
    m.vocabulary("qwen2")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s)
        qk_norms(m, b, s.hd)
        experts(m, b, s)


# -- olmoe
@family("olmoe")
def olmoe(m: TinyModel, size: int) -> None:
    """Norms over the whole row of queries and of keys."""
    s = (
        Shape(n=256, layers=2, heads=4, kv=4, hd=64, ff=256, experts=8, top_k=2),
        Shape(n=192, layers=3, heads=6, kv=6, hd=32, ff=96, experts=17, top_k=6),
    )[size]
    common_keys(m, s, s.ff, base=10000.0, eps=1e-5, lengths=False)
    expert_keys(m, s)
    m.vocabulary("olmo")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s)
        qk_norms(m, b, s.n)
        experts(m, b, s, down=4.0)
