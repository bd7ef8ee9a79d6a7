"""qwen2 (biases on q, k, v) and qwen2moe (experts not normalized, a shared expert behind a sigmoid gate)."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder
from vllm_cpp.models.registry import family

QWEN2 = decoder.Traits(head_bias=True)
QWEN2MOE = decoder.Traits(
    tied_head=False,
    normalize_experts=False,
    expert_width=decoder.expert_width_or_share,
    shared_width=decoder.shared_length_or_dense,
    gated_shared_expert=True,
)


@family("qwen2", pools=True)
def qwen2(b: Builder, hp: HyperParameters) -> None:
    decoder.describe(b, hp, QWEN2)


@family("qwen2moe", streams_experts=True, places_experts=True, pools=True)
def qwen2moe(b: Builder, hp: HyperParameters) -> None:
    decoder.describe(b, hp, QWEN2MOE)
