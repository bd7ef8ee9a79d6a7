"""bailingmoe3 (Ling, Ring): the delta rule with a bounded decay a key channel, latent attention behind a gate a head in some layers,
activations that are cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vllm_cpp.gguf_file.hparams import HyperParameters, Keys
from vllm_cpp.kernels.cpu import gates, rope
from vllm_cpp.kernels.cpu.elementwise import SILU_GATED, SILU_THEN_CUT, Activation
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.operations import attention, latent
from vllm_cpp.models.operations.channel_delta import channel_delta
from vllm_cpp.models.operations.recurrence import side_by_side
from vllm_cpp.models.registry import family

_LEAST_LIMIT = 1e-6  # a smaller one means none


def shared_width(hp: HyperParameters, il: int) -> int:
    """expert_shared_feed_forward_length, else as wide as expert_shared_count experts, but at least one."""
    return hp.shared_expert_feed_forward_length or hp.expert_feed_forward_length[il] * max(1, hp.num_shared_experts)


TRAITS = decoder.Traits(
    expert_scores=None,
    needs_expert_bias=True,
    normalize_experts=None,
    scale_experts=True,
    expert_width=decoder.expert_length,
    shared_width=shared_width,
)


@family("bailingmoe3", kv_shapes=latent.latent_where_heads, streams_experts=True, places_experts=True)
def bailingmoe3(b: Builder, hp: HyperParameters) -> None:
    lengths, bound = latent.latent_of(b.keys, hp), _bound(b.keys)
    cuts, shared_cuts = (b.keys.numbers_per_layer(f"swiglu_clamp_{part}", hp.block_count, 0.0) for part in ("exp", "shexp"))
    by = _turn(b, hp)

    def mixer(il: int, h: Rows) -> decoder.Mixed:
        if not hp.num_kv_heads[il]:
            return decoder.Mixed(channel_delta(b, hp, il, h, bound=bound), "attn_output")
        gate = side_by_side(b, h, "gate a head", {f"blk.{il}.attn_gate": lengths.num_heads}, barrier=False)
        mixed = latent.latent_attention(b, hp, il, h, lengths, by=by, scale=lengths.query**-0.5)
        attention.gate(b, mixed, gate, gates.SIGMOID, lengths.value)
        return decoder.Mixed(mixed, "attn_output")

    def feed(il: int, h: Rows, x: Rows) -> None:
        shared = _activation(shared_cuts[il])
        if il < hp.num_leading_dense_layers:
            decoder.dense(b, il, h, x, hp.feed_forward_length[il], activation=shared)
        else:
            decoder.experts(b, hp, replace(TRAITS, activation=_activation(cuts[il])), il, h, x, shared_activation=shared)

    decoder.describe(b, hp, TRAITS, mixer=mixer, feed=feed)


def _turn(b: Builder, hp: HyperParameters) -> attention.Turn:
    """Neighbours turn. Files of models that also see have sections of pairs; there a pair is two halves, and in text, where only the fourth
    position of a token is 0, all pairs turn but those of the fourth section."""
    sections = b.keys.kv.get_array(f"{b.keys.prefix}rope.dimension_sections", "int", None)
    if sections is None or len(sections) < 2 or sections[:2].min() <= 0:
        return decoder.rope_of(b, hp, rope.NEIGHBOURS)
    if len(sections) > 4 or sections.min() < 0:
        b.keys.refuse("rope.dimension_sections", f"is {sections.tolist()}, expected up to four numbers of pairs")
    place = np.arange(hp.rope.dimension_count // 2) % sections.sum()
    return decoder.rope_of(b, hp, rope.NEOX, turned=place < sections[:3].sum())


def _bound(keys: Keys) -> float:
    """The least logarithm of a decay."""
    if not keys.boolean("kda.safe_gate", True):
        keys.refuse("kda.safe_gate", "is false: decays without a bound have no definition here")
    bound = keys.kv.get_f32(f"{keys.prefix}kda.gate_lower_bound")
    if not bound < 0:
        keys.refuse("kda.gate_lower_bound", f"is {bound}, expected a number below 0")
    return float(bound)


def _activation(limit: float) -> Activation:
    return Activation(SILU_THEN_CUT, limit) if limit > _LEAST_LIMIT else SILU_GATED
