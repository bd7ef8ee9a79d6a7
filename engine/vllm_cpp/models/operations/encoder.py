"""Encoders as operations: norms around the mean, and attention in which every token of a text sees every other.

Owns nothing between steps: a text comes as a whole, and its keys and values stand in the step's rows. Must not know architectures.
"""

from __future__ import annotations

from vllm_cpp.kernels.cpu import encoder
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Address, Builder, Rows


def layernorm(b: Builder, x: Rows, weight: Address, bias: Address, eps: float, label: str) -> None:
    """x = (x - mean) / sqrt(variance + eps) * weight + bias, row by row, in place."""
    record = pack(
        encoder.LAYERNORM_FIELDS, count=x.count, x=x.address, x_stride=x.stride, width=x.width, weight=weight, bias=bias, eps=float(eps),
        out=x.address, out_stride=x.stride,
    )  # fmt: skip
    b.program.add(encoder.layernorm, record, f"{x.name} = layernorm({x.name}, {label})")
    x.quantized.clear()


def attention(b: Builder, q: Rows, k: Rows, v: Rows, out: Rows, head_dim: int, scale: float) -> None:
    """out = softmax(q · k * scale) · v, heads of `head_dim` side by side; the step's runs are whole texts."""
    step = b.step
    record = pack(
        encoder.TEXT_ATTENTION_FIELDS, texts=b.count("seqs"), starts=step.run_starts.ctypes.data, q=q.address, q_stride=q.stride,
        k=k.address, k_stride=k.stride, v=v.address, v_stride=v.stride, n_heads=q.width // head_dim, n_kv_heads=k.width // head_dim,
        head_dim=head_dim, scale=float(scale), out=out.address, out_stride=out.stride, scratch=0, scratch_stride=0,
    )  # fmt: skip
    b.wants_scratch(record, encoder.TEXT_ATTENTION_FIELDS, encoder.scratch_bytes(step.max_tokens))
    b.program.add(encoder.text_attention, record, f"{out.name} = attention({q.name}) over the whole text")
    out.quantized.clear()
