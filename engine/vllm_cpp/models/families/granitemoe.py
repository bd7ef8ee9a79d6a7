"""granitemoe: llama with four scalars of its own, experts in every layer, in some models beside a shared one."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import rope
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder
from vllm_cpp.models.registry import family


@family("granitemoe", streams_experts=True, places_experts=True)
def granitemoe(b: Builder, hp: HyperParameters) -> None:
    # But for the last, a scalar that is missing or 0 changes nothing.
    traits = decoder.Traits(
        rope_layout=rope.NEIGHBOURS,
        output_bias=True,
        shared_width=decoder.shared_length,
        embedding_scale=b.keys.number("embedding_scale", 0.0, positive=False) or 1.0,
        residual_scale=b.keys.number("residual_scale", 0.0, positive=False) or 1.0,
        attention_scale=b.keys.number("attention.scale", 0.0, positive=False),
        logit_divisor=b.keys.number("logit_scale"),
    )
    decoder.describe(b, hp, traits)
