"""gpt-oss: a window in every other layer, a sink a head, experts with biases and their own activation."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import router
from vllm_cpp.kernels.cpu.elementwise import SHIFTED_SILU, Activation
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.registry import family

TRAITS = decoder.Traits(
    output_bias=True,
    tied_head=False,
    ffn_norm="post_attention_norm",
    expert_scores=router.SOFTMAX_CHOSEN,
    normalize_experts=False,
    expert_width=decoder.expert_length,
    activation=Activation(SHIFTED_SILU, 7.0),
)


@family("gpt-oss", streams_experts=True, places_experts=True)
def gpt_oss(b: Builder, hp: HyperParameters) -> None:
    decoder.check_widths(b, hp)
    slides, window = decoder.sliding_layers(b, hp, 2), b.keys.integer("attention.sliding_window", least=1)
    near = decoder.near_rope(b, hp, hp.key_length, base=hp.rope.freq_base)
    turn = decoder.rope_of(b, hp, TRAITS.rope_layout)
    turn_near = turn if near == hp.rope else decoder.rope_of(b, hp, TRAITS.rope_layout, near)

    def mixer(il: int, h: Rows) -> decoder.Mixed:
        sinks = b.vector(f"blk.{il}.attn_sinks.weight", hp.num_heads[il])
        by, seen = (turn_near, window) if slides[il] else (turn, 0)
        return decoder.Mixed(decoder.attention(b, hp, TRAITS, il, h, by, window=seen, sinks=sinks), "attn_output")

    decoder.describe(b, hp, TRAITS, mixer=mixer)
