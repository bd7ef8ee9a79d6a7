"""minimax-m2: q and k normed over the whole row, a part of each head turned, experts in every layer."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder
from vllm_cpp.models.registry import family

TRAITS = decoder.Traits(qk_norm=decoder.WHOLE_ROW, tied_head=False, expert_scores=None, needs_expert_bias=True)


@family("minimax-m2", streams_experts=True, places_experts=True)
def minimax_m2(b: Builder, hp: HyperParameters) -> None:
    decoder.describe(b, hp, TRAITS)
