"""dots1: each head of q and k normed by itself; dense layers first, then experts beside a shared one."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder
from vllm_cpp.models.registry import family

TRAITS = decoder.Traits(
    qk_norm=decoder.PER_HEAD,
    tied_head=False,
    expert_scores=None,
    normalize_experts=None,
    scale_experts=True,
    expert_width=decoder.expert_length,
    shared_width=decoder.shared_by_count,
)


@family("dots1", streams_experts=True, places_experts=True)
def dots1(b: Builder, hp: HyperParameters) -> None:
    decoder.describe(b, hp, TRAITS)
