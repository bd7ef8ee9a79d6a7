"""deepseek2: DeepSeek-V2, V2-Lite, V3 and R1, Kimi-K2, GLM-4.7-Flash. Latent attention, dense layers first, then experts beside a shared
one."""

from __future__ import annotations

import math
from dataclasses import replace

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import rope, router
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.operations import attention, latent
from vllm_cpp.models.registry import family

TRAITS = decoder.Traits(
    reads_expert_scores=True, normalize_experts=None, scale_experts=True, expert_width=decoder.expert_length,
    shared_width=decoder.shared_by_count,
)  # fmt: skip
# Files of GLM-4.7-Flash without expert_gating_func mean sigmoid; nothing else tells them.
_SIGMOID_LAYERS, _SIGMOID_VOCABULARY = (47, 48), 154880


@family("deepseek2", kv_shapes=latent.latent_everywhere, streams_experts=True, places_experts=True)
def deepseek2(b: Builder, hp: HyperParameters) -> None:
    lengths = latent.latent_of(b.keys, hp)
    multiplier = b.keys.number("rope.scaling.yarn_log_multiplier", 0.0, positive=False)
    magnitude, temperature = magnitude_and_temperature(hp, multiplier / 0.1)
    if hp.rope.scaling == "longrope":
        b.keys.refuse("rope.scaling.type", "is 'longrope', expected none, linear or yarn")
    frequencies, _ = rope.rope_frequencies(
        hp.rope.dimension_count, hp.rope.freq_base, scaling=hp.rope.scaling, factor=hp.rope.factor,
        original_context=hp.rope.original_context_length,
    )  # fmt: skip
    by = attention.rope_table(b, frequencies, magnitude, rope.NEIGHBOURS)
    scale = temperature**2 / math.sqrt(lengths.query)
    # Mistral-Large-3 warms the scores of late positions.
    warming = b.keys.number("attention.temperature_scale", 0.0, positive=False)
    context = b.keys.integer("attention.temperature_length", least=1) if warming else 1

    def mixer(il: int, h: Rows) -> decoder.Mixed:
        out = latent.latent_attention(b, hp, il, h, lengths, by=by, scale=scale, temperature=warming, temperature_context=context)
        return decoder.Mixed(out, "attn_output")

    decoder.describe(b, hp, traits_of(hp), mixer=mixer)


def traits_of(hp: HyperParameters) -> decoder.Traits:
    """With the scoring function that files without expert_gating_func mean."""
    is_glm = hp.num_layers in _SIGMOID_LAYERS and hp.vocab_size == _SIGMOID_VOCABULARY
    return replace(TRAITS, expert_scores=router.SIGMOID) if is_glm else TRAITS


def magnitude_and_temperature(hp: HyperParameters, multiplier: float) -> tuple[float, float]:
    """What cosines and sines are multiplied by, and the root of what scores are multiplied by (FAMILIES: deepseek2, Temperature).
    `multiplier` is the original models' mscale_all_dim."""
    factor, growth = hp.rope.attn_factor, 0.1 * math.log(hp.rope.factor)
    if hp.rope.scaling == "yarn" and multiplier:
        return factor, factor * (1 + growth * multiplier)
    turned = factor * (1 + growth) if hp.rope.scaling == "yarn" else factor
    return turned, factor * (1 + growth) * (1 + growth * multiplier)
