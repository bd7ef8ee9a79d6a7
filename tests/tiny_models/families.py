"""The tiny models, one function a family.

Owns shapes and keys; what is computed with them is in models/. Size 0 has widths that fit every encoding; size 1 has other head counts,
an odd number of experts, another top-k, other optional tensors, and rows that do not fill blocks of 256. The gains are chosen so that
logits are neither flat nor saturated, and the choice of experts is clear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .model import VOCAB, TinyModel


@dataclass(frozen=True, kw_only=True)
class Shape:
    """n: width, hd: head size, ff: feed-forward width (of one expert, where there are experts)."""

    n: int
    layers: int
    heads: int
    kv: int
    hd: int
    ff: int
    experts: int = 0
    top_k: int = 0
    ff_shared: int = 0


Build = Callable[[TinyModel, int], None]
FAMILIES: dict[str, tuple[str, Build]] = {}  # family -> (architecture, builder)


def family(name: str, arch: str | None = None) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        FAMILIES[name] = (arch or name, build)
        return build

    return register


# -- parts
def common_keys(m: TinyModel, s: Shape, ff: int, *, base: float, eps: float = 1e-6, lengths: bool = True, rot: bool = False) -> None:
    m.keys(
        {
            "context_length": 512,
            "embedding_length": s.n,
            "block_count": s.layers,
            "feed_forward_length": ff,
            "attention.head_count": s.heads,
            "attention.head_count_kv": s.kv,
            "attention.key_length": s.hd if lengths else None,
            "attention.value_length": s.hd if lengths else None,
            "attention.layer_norm_rms_epsilon": eps,
            "rope.freq_base": base,
            "rope.dimension_count": s.hd if rot else None,
        }
    )


def expert_keys(m: TinyModel, s: Shape, width: int | None = None) -> None:
    m.keys(
        {
            "expert_count": s.experts,
            "expert_used_count": s.top_k,
            "expert_feed_forward_length": width,
            "expert_shared_feed_forward_length": s.ff_shared or None,
        }
    )


def ends(m: TinyModel, n: int, tied: bool = False) -> None:
    """Embedding, last norm, head. A tied model's embedding is quiet, or every token would predict itself."""
    m.weights("token_embd.weight", (VOCAB, n), 3.2 / n**0.5 if tied else 1.0)
    norm(m, "output_norm", n)
    if not tied:
        m.matrix("output.weight", VOCAB, n, gain=3.0)


def norm(m: TinyModel, name: str, n: int, mean: float = 1.0) -> None:
    m.vector(f"{name}.weight", n, mean=mean)


def norms(m: TinyModel, b: str, n: int) -> None:
    norm(m, b + "attn_norm", n)
    norm(m, b + "ffn_norm", n)


def attention(m: TinyModel, b: str, s: Shape, *, bias: bool = False, out_bias: bool = False, out: float = 1.5) -> None:
    for name, rows, gain in (("attn_q", s.heads * s.hd, 1.5), ("attn_k", s.kv * s.hd, 1.5), ("attn_v", s.kv * s.hd, 1.0)):
        m.matrix(f"{b}{name}.weight", rows, s.n, gain=gain)
        if bias:
            m.vector(f"{b}{name}.bias", rows, std=0.5)
    m.matrix(b + "attn_output.weight", s.n, s.heads * s.hd, gain=out)
    if out_bias:
        m.vector(b + "attn_output.bias", s.n, std=0.3)


def qk_norms(m: TinyModel, b: str, n: int) -> None:
    norm(m, b + "attn_q_norm", n, 1.5)
    norm(m, b + "attn_k_norm", n, 1.5)


def dense(m: TinyModel, b: str, n: int, ff: int, suffix: str = "", *, down: float = 2.0, bias: bool = False) -> None:
    m.matrix(f"{b}ffn_gate{suffix}.weight", ff, n)
    m.matrix(f"{b}ffn_up{suffix}.weight", ff, n)
    m.matrix(f"{b}ffn_down{suffix}.weight", n, ff, gain=down)
    if bias:
        m.vector(b + "ffn_gate.bias", ff, std=0.3)
        m.vector(b + "ffn_up.bias", ff, std=0.3)
        m.vector(b + "ffn_down.bias", n, std=0.3)


def experts(m: TinyModel, b: str, s: Shape, down: float = 3.0) -> None:
    m.matrix(b + "ffn_gate_inp.weight", s.experts, s.n, gain=2.0, encoding="F32")
    m.matrix(b + "ffn_gate_exps.weight", s.experts, s.ff, s.n)
    m.matrix(b + "ffn_up_exps.weight", s.experts, s.ff, s.n)
    m.matrix(b + "ffn_down_exps.weight", s.experts, s.n, s.ff, gain=down)


# -- llama
@family("llama")
def llama(m: TinyModel, size: int) -> None:
    """Size 1: every bias there is, and heads that do not add up to the width."""
    s = (Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=512), Shape(n=320, layers=3, heads=6, kv=3, hd=32, ff=352))[size]
    biases = size == 1
    common_keys(m, s, s.ff, base=10000.0, rot=True)
    m.keys({"vocab_size": VOCAB})
    m.vocabulary("llama-bpe")
    ends(m, s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        norms(m, b, s.n)
        attention(m, b, s, bias=biases, out_bias=biases)
        dense(m, b, s.n, s.ff, bias=biases)


@family("llama_moe", "llama")
def llama_moe(m: TinyModel, size: int) -> None:
    """Mixtral's form. Size 0 leaves the head's length out, size 1 scales rope linearly."""
    s = (
        Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=256, experts=8, top_k=2),
        Shape(n=384, layers=3, heads=6, kv=2, hd=64, ff=160, experts=7, top_k=3),
    )[size]
    common_keys(m, s, s.ff, base=1e6, lengths=size == 1, rot=True)
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
    common_keys(m, s, s.ff, base=(10000.0, 500000.0)[size], rot=True)
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
        dense(m, b, s.n, s.ff)


@family("llama_rope_freqs", "llama")
def llama_rope_freqs(m: TinyModel, size: int) -> None:
    """Llama 3.1's rope factors, as a tensor. Size 0 has a tied head."""
    s = (Shape(n=256, layers=2, heads=8, kv=2, hd=32, ff=512), Shape(n=288, layers=3, heads=3, kv=1, hd=96, ff=320))[size]
    common_keys(m, s, s.ff, base=500000.0, rot=True)
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
        dense(m, b, s.n, s.ff_shared, "_shexp")


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
