"""nemotron_h and nemotron_h_moe: one part a layer - a state space of the second generation, attention without positions, or a
feed-forward part of squared relus (in nemotron_h_moe experts, which may work on a narrower copy of the stream)."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import router
from vllm_cpp.kernels.cpu.elementwise import SQUARED_RELU, Activation
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.operations import experts as expert_ops
from vllm_cpp.models.operations.state_space import mamba2
from vllm_cpp.models.registry import attention_where_heads, family

TRAITS = decoder.Traits(
    output_bias=True,
    ffn_bias=True,
    activation=Activation(SQUARED_RELU),
    expert_scores=router.SIGMOID,
    needs_expert_bias=True,
    normalize_experts=None,
    scale_experts=True,
    expert_width=decoder.expert_width_or_share,
    shared_width=decoder.shared_length,
)


@family("nemotron_h_moe", kv_shapes=attention_where_heads, streams_experts=True, places_experts=True)
@family("nemotron_h", kv_shapes=attention_where_heads)
def nemotron_h(b: Builder, hp: HyperParameters) -> None:
    decoder.check_widths(b, hp)
    x = decoder.embedding(b, hp, TRAITS)
    for il in range(hp.num_layers):
        last = il == hp.num_layers - 1
        if hp.feed_forward_length[il]:
            x = decoder.only_sampled(b, x) if last else x
            feed(b, hp, il, decoder.norm(b, hp, f"blk.{il}.attn_norm", x), x)
            continue
        h = decoder.norm(b, hp, f"blk.{il}.attn_norm", x)
        mixed = mixer(b, hp, il, h)
        if last:
            mixed, x = decoder.Mixed(decoder.only_sampled(b, mixed.rows), mixed.output), decoder.only_sampled(b, x)
        decoder.add_projected(b, hp, TRAITS, il, mixed, x)
    decoder.head(b, hp, TRAITS, x)


def mixer(b: Builder, hp: HyperParameters, il: int, h: Rows) -> decoder.Mixed:
    if hp.num_kv_heads[il]:
        return decoder.Mixed(decoder.attention(b, hp, TRAITS, il, h, None), "attn_output")
    return decoder.Mixed(mamba2(b, il, h, hp.rms_epsilon), "ssm_out")


def feed(b: Builder, hp: HyperParameters, il: int, h: Rows, x: Rows) -> None:
    if not hp.num_experts:
        decoder.dense(b, il, h, x, hp.feed_forward_length[il], bias=TRAITS.ffn_bias, activation=TRAITS.activation)
    elif f"blk.{il}.ffn_latent_down.weight" in b.model.tensors:
        latent_experts(b, hp, il, h, x, b.keys.integer("moe_latent_size", 0) or x.width)
    else:
        decoder.experts(b, hp, TRAITS, il, h, x)


def latent_experts(b: Builder, hp: HyperParameters, il: int, h: Rows, x: Rows, latent: int) -> None:
    """x += latent_up · experts(latent_down · h); router and shared expert see h."""
    name = f"blk.{il}.ffn_latent"
    down, up = b.weight(f"{name}_down.weight", latent, h.width), b.weight(f"{name}_up.weight", x.width, latent)
    u, y = b.rows("latent", latent, h.count), b.rows("latent out", latent, h.count)
    routes = decoder.route(b, hp, TRAITS, il, h)
    towers = expert_ops.towers(b, il, hp.num_experts, decoder.expert_width_or_share(hp, il), latent, gated=TRAITS.activation.gated)
    b.matmul(down, h, u, scale=b.maybe_vector(f"{name}_down.scale", 1))
    shared = decoder.SharedExpert(b, hp, TRAITS, il, h, x)
    expert_ops.experts(b, routes, u, towers, y, activation=TRAITS.activation, accumulate=False, meanwhile=shared.compute)
    b.matmul(up, y, x, accumulate=True, scale=b.maybe_vector(f"{name}_up.scale", 1))
    shared.add()
