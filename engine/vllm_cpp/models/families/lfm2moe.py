"""lfm2moe: short convolutions between two products, attention in some layers, experts behind the leading dense layers."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.operations.recurrence import columns, convolution, taps_of
from vllm_cpp.models.registry import attention_where_heads, family

TRAITS = decoder.Traits(
    qk_norm=decoder.PER_HEAD,
    output_norm="token_embd_norm",  # so it is called; it is not applied to embeddings
    expert_scores=None,
    needs_expert_bias=True,
    expert_width=decoder.expert_length,
)


@family("lfm2moe", kv_shapes=attention_where_heads, streams_experts=True, places_experts=True)
def lfm2moe(b: Builder, hp: HyperParameters) -> None:
    decoder.check_widths(b, hp)
    turn = decoder.rope_of(b, hp, TRAITS.rope_layout)

    def mixer(il: int, h: Rows) -> decoder.Mixed:
        if hp.num_kv_heads[il]:
            return decoder.Mixed(decoder.attention(b, hp, TRAITS, il, h, turn), "attn_output")
        return decoder.Mixed(short_convolution(b, il, h), "shortconv.out_proj")

    decoder.describe(b, hp, TRAITS, mixer=mixer)


def short_convolution(b: Builder, il: int, h: Rows) -> Rows:
    """c * convolution(b * v) of [b | c | v] = in_proj · h."""
    n, name = h.width, f"blk.{il}.shortconv"
    weight = b.weight(f"{name}.in_proj.weight", 3 * n, n)
    taps = taps_of(b, f"{name}.conv.weight", n, b.keys.integer("shortconv.l_cache", least=1))
    parts, out = b.rows("b, c, v", 3 * n, h.count), b.rows("short convolution", n, h.count)
    b.matmul(weight, h, parts, scale=b.maybe_vector(f"{name}.in_proj.scale", 1))
    convolution(b, columns(parts, 2 * n, n), taps, out, silu=False, times=columns(parts, 0, n), gate=columns(parts, n, n))
    return out
