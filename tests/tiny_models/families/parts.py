"""What families are put together from: shapes, groups of keys, groups of tensors.

Owns the table of families and the parts more than one of them uses. Must not know which family uses what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..model import VOCAB, TinyModel


@dataclass(frozen=True, kw_only=True)
class Shape:
    """n: width, hd: head size, ff: feed-forward width (of one expert, where all layers have experts)."""

    n: int
    layers: int
    heads: int
    kv: int
    hd: int
    ff: int = 0
    experts: int = 0
    top_k: int = 0
    ff_expert: int = 0
    ff_shared: int = 0

    @property
    def expert_width(self) -> int:
        return self.ff_expert or self.ff


Build = Callable[[TinyModel, int], None]
FAMILIES: dict[str, tuple[str, Build]] = {}  # family -> (architecture, builder)


def family(name: str, arch: str | None = None) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        FAMILIES[name] = (arch or name, build)
        return build

    return register


# -- keys
def common_keys(
    m: TinyModel,
    s: Shape,
    ff: int,
    *,
    base: float = 10000.0,
    eps: float = 1e-6,
    lengths: bool = True,
    rot: int | None = None,
    extra_blocks: int = 0,
    kv: list[int] | None = None,
) -> None:
    """The keys of families that are attention in every layer. `extra_blocks` are counted, but no layers of the model; `kv` is
    head_count_kv where it is a list."""
    m.keys(
        {
            "context_length": 512,
            "embedding_length": s.n,
            "block_count": s.layers + extra_blocks,
            "feed_forward_length": ff,
            "attention.head_count": s.heads,
            "attention.head_count_kv": kv or s.kv,
            "attention.key_length": s.hd if lengths else None,
            "attention.value_length": s.hd if lengths else None,
            "attention.layer_norm_rms_epsilon": eps,
            "rope.freq_base": base,
            "rope.dimension_count": rot,
        }
    )


def hybrid_keys(m: TinyModel, n: int, layers: int, ff: int | list[int], *, eps: float = 1e-6) -> None:
    """The first keys of families that mix kinds of layers; each goes on with its own."""
    m.keys(
        {
            "context_length": 4096,
            "embedding_length": n,
            "block_count": layers,
            "feed_forward_length": ff,
            "attention.layer_norm_rms_epsilon": eps,
            "vocab_size": VOCAB,
        }
    )


def head_keys(m: TinyModel, heads: int | list[int], kv: int | list[int], hd: int | None) -> None:
    m.keys({"attention.head_count": heads, "attention.head_count_kv": kv, "attention.key_length": hd, "attention.value_length": hd})


def expert_keys(m: TinyModel, s: Shape, width: int | None = None, **more: Any) -> None:
    """`more`: further keys, without their prefix `expert_` (shared_count, weights_scale, weights_norm, gating_func)."""
    m.keys(
        {
            "expert_count": s.experts,
            "expert_used_count": s.top_k,
            "expert_feed_forward_length": width,
            "expert_shared_count": more.pop("shared_count", None),
            "expert_shared_feed_forward_length": s.ff_shared or None,
        }
    )
    m.keys({f"expert_{name}": v for name, v in more.items()})


# -- tensors
def ends(m: TinyModel, n: int, tied: bool = False) -> None:
    """Embedding, last norm, head. A tied model's embedding is quiet, or every token would predict itself."""
    m.weights("token_embd.weight", (VOCAB, n), 3.2 / n**0.5 if tied else 1.0)
    norm(m, "output_norm", n)
    if not tied:
        m.matrix("output.weight", VOCAB, n, gain=3.0)


def norm(m: TinyModel, name: str, n: int, mean: float = 1.0) -> None:
    m.vector(f"{name}.weight", n, mean=mean)


def norms(m: TinyModel, b: str, n: int, second: str = "ffn_norm") -> None:
    norm(m, b + "attn_norm", n)
    norm(m, b + second, n)


def projections(m: TinyModel, b: str, n: int, q: int, k: int, v: int, *, qk_gain: float = 1.0, bias: float = 0.0) -> None:
    """attn_q, attn_k and attn_v with so many rows, and biases of that standard deviation if there is one."""
    for name, rows, gain in (("attn_q", q, qk_gain), ("attn_k", k, qk_gain), ("attn_v", v, 1.0)):
        m.matrix(f"{b}{name}.weight", rows, n, gain=gain)
        if bias:
            m.vector(f"{b}{name}.bias", rows, std=bias)


def attention(
    m: TinyModel, b: str, s: Shape, *, bias: bool = False, out_bias: bool = False, qk_gain: float = 1.5, out: float = 1.5
) -> None:
    projections(m, b, s.n, s.heads * s.hd, s.kv * s.hd, s.kv * s.hd, qk_gain=qk_gain, bias=0.5 if bias else 0.0)
    m.matrix(b + "attn_output.weight", s.n, s.heads * s.hd, gain=out)
    if out_bias:
        m.vector(b + "attn_output.bias", s.n, std=0.3)


def qk_norms(m: TinyModel, b: str, q: int, k: int | None = None, mean: float = 1.5) -> None:
    norm(m, b + "attn_q_norm", q, mean)
    norm(m, b + "attn_k_norm", q if k is None else k, mean)


def dense(m: TinyModel, b: str, n: int, ff: int, suffix: str = "", *, down: float = 1.0, bias: bool = False, gate: bool = True) -> None:
    for part in ("gate", "up") if gate else ("up",):
        m.matrix(f"{b}ffn_{part}{suffix}.weight", ff, n)
    m.matrix(f"{b}ffn_down{suffix}.weight", n, ff, gain=down)
    if bias:
        m.vector(b + "ffn_gate.bias", ff, std=0.3)
        m.vector(b + "ffn_up.bias", ff, std=0.3)
        m.vector(b + "ffn_down.bias", n, std=0.3)


def router(m: TinyModel, b: str, n: int, experts: int, bias: float = 0.0, gain: float = 2.0) -> None:
    """`bias`: the standard deviation of what is added to the scores for the choice alone."""
    m.matrix(b + "ffn_gate_inp.weight", experts, n, gain=gain, encoding="F32")
    if bias:
        m.vector(b + "exp_probs_b.bias", experts, std=bias)


def towers(m: TinyModel, b: str, n: int, ff: int, experts: int, *, down: float = 1.0, parts: Sequence[str] = ("gate", "up")) -> None:
    """`parts`: ("gate", "up"), ("up",), or ("gate_up",), one tower whose slices hold gate's rows first."""
    for part in parts:
        m.matrix(f"{b}ffn_{part}_exps.weight", experts, 2 * ff if part == "gate_up" else ff, n)
    m.matrix(b + "ffn_down_exps.weight", experts, n, ff, gain=down)


def experts(m: TinyModel, b: str, s: Shape, *, down: float = 3.0, bias: float = 0.0) -> None:
    router(m, b, s.n, s.experts, bias)
    towers(m, b, s.n, s.expert_width, s.experts, down=down)


def draft_head(m: TinyModel, b: str, n: int) -> None:
    """What makes a block one that guesses the token after next. Plain decoding never reads it."""
    m.matrix(b + "nextn.eh_proj.weight", n, 2 * n)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        norm(m, f"{b}nextn.{name}", n)
