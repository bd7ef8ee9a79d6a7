"""glm4moe: GLM-4.5 and 4.6. A part of each head is turned; dense layers first, then experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import router
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder
from vllm_cpp.models.registry import family

TRAITS = decoder.Traits(
    ffn_norm="post_attention_norm",
    expert_scores=router.SIGMOID,
    reads_expert_scores=True,
    needs_expert_bias=True,
    normalize_experts=None,
    scale_experts=True,
    expert_width=decoder.expert_width_or_share,
    shared_width=decoder.shared_by_count,
)


@family("glm4moe", streams_experts=True, places_experts=True)
def glm4moe(b: Builder, hp: HyperParameters) -> None:
    normed = "blk.0.attn_q_norm.weight" in b.model.tensors  # the small model's queries and keys are not
    decoder.describe(b, hp, replace(TRAITS, qk_norm=decoder.PER_HEAD if normed else None))
