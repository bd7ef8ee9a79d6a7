"""granitehybrid: state spaces of the second generation, attention in some layers, scales on embedding, residual, scores and logits."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import rope
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.operations.state_space import mamba2
from vllm_cpp.models.registry import attention_where_heads, family


@family("granitehybrid", kv_shapes=attention_where_heads, streams_experts=True, places_experts=True)
def granitehybrid(b: Builder, hp: HyperParameters) -> None:
    decoder.check_widths(b, hp)
    traits = decoder.Traits(
        rope_layout=rope.NEIGHBOURS,
        output_bias=True,
        ffn_bias=True,
        shared_width=decoder.shared_length,
        embedding_scale=b.keys.number("embedding_scale", 0.0, positive=False) or 1.0,
        residual_scale=b.keys.number("residual_scale", 0.0, positive=False) or 1.0,
        attention_scale=b.keys.number("attention.scale", 0.0, positive=False),
        logit_divisor=b.keys.number("logit_scale", 0.0, positive=False) or 1.0,
    )
    turn = decoder.rope_of(b, hp, traits.rope_layout) if b.keys.boolean("rope.scaling.finetuned", True) else None

    def mixer(il: int, h: Rows) -> decoder.Mixed:
        if hp.num_kv_heads[il]:
            return decoder.Mixed(decoder.attention(b, hp, traits, il, h, turn), "attn_output")
        return decoder.Mixed(mamba2(b, il, h, hp.rms_epsilon), "ssm_out")

    decoder.describe(b, hp, traits, mixer=mixer)
