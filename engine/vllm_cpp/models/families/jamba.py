"""jamba: state spaces of the first generation, attention without positions in some layers, experts wherever a layer has a router."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.operations.state_space import mamba
from vllm_cpp.models.registry import attention_where_heads, family

TRAITS = decoder.Traits(normalize_experts=False)


@family("jamba", kv_shapes=attention_where_heads, streams_experts=True, places_experts=True)
def jamba(b: Builder, hp: HyperParameters) -> None:
    decoder.check_widths(b, hp)

    def mixer(il: int, h: Rows) -> decoder.Mixed:
        if hp.num_kv_heads[il]:
            return decoder.Mixed(decoder.attention(b, hp, TRAITS, il, h, None), "attn_output")
        return decoder.Mixed(mamba(b, il, h, hp.rms_epsilon), "ssm_out")

    def feed(il: int, h: Rows, x: Rows) -> None:
        if f"blk.{il}.ffn_gate_inp.weight" in b.model.tensors:  # no key says which layers have experts
            decoder.experts(b, hp, TRAITS, il, h, x)
        else:
            decoder.dense(b, il, h, x, hp.feed_forward_length[il])

    decoder.describe(b, hp, TRAITS, mixer=mixer, feed=feed)
