"""kimi-linear: the delta rule with a decay a key channel, latent attention in some layers; nothing turns by its position."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.operations import latent
from vllm_cpp.models.operations.channel_delta import channel_delta
from vllm_cpp.models.registry import family

TRAITS = decoder.Traits(
    tied_head=False,
    expert_scores=None,
    needs_expert_bias=True,
    scale_experts=True,
    expert_width=decoder.expert_length,
    shared_width=decoder.shared_by_count,
)


@family("kimi-linear", kv_shapes=latent.latent_where_heads, streams_experts=True, places_experts=True)
def kimi_linear(b: Builder, hp: HyperParameters) -> None:
    lengths = latent.latent_of(b.keys, hp)

    def mixer(il: int, h: Rows) -> decoder.Mixed:
        if hp.num_kv_heads[il]:
            return decoder.Mixed(latent.latent_attention(b, hp, il, h, lengths, by=None, scale=lengths.query**-0.5), "attn_output")
        return decoder.Mixed(channel_delta(b, hp, il, h), "attn_output")

    decoder.describe(b, hp, TRAITS, mixer=mixer)
