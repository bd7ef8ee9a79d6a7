"""mistral3: llama with yarn's own numbers, and queries that grow warmer with their position."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.families.llama import TRAITS, turns_whole_heads
from vllm_cpp.models.registry import family


@family("mistral3", streams_experts=True, places_experts=True)
def mistral3(b: Builder, hp: HyperParameters) -> None:
    turns_whole_heads(hp)
    decoder.check_widths(b, hp)
    turn = decoder.rope_of(
        b, hp, TRAITS.rope_layout,
        beta_fast=b.keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=b.keys.number("rope.scaling.yarn_beta_slow", 1.0),
        log_multiplier=b.keys.number("rope.scaling.yarn_log_multiplier", 0.0, positive=False),
    )  # fmt: skip
    temperature = b.keys.number("attention.temperature_scale", 0.0, positive=False)

    def mixer(il: int, h: Rows) -> decoder.Mixed:
        mixed = decoder.attention(
            b, hp, TRAITS, il, h, turn, temperature=temperature, temperature_context=hp.rope.original_context_length
        )  # fmt: skip
        return decoder.Mixed(mixed, "attn_output")

    decoder.describe(b, hp, TRAITS, mixer=mixer)
