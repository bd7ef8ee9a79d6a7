"""qwen3 (each head of q and k normed by itself) and qwen3moe (experts in every layer, weights normalized)."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder
from vllm_cpp.models.registry import family

QWEN3 = decoder.Traits(qk_norm=decoder.PER_HEAD)
QWEN3MOE = decoder.Traits(qk_norm=decoder.PER_HEAD, expert_width=decoder.expert_width_or_share)


@family("qwen3", pools=True)
def qwen3(b: Builder, hp: HyperParameters) -> None:
    decoder.describe(b, hp, QWEN3)


@family("qwen3moe", streams_experts=True, places_experts=True, pools=True)
def qwen3moe(b: Builder, hp: HyperParameters) -> None:
    decoder.describe(b, hp, QWEN3MOE)
