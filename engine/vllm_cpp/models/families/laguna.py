"""laguna: full and sliding layers with other head counts and positions, a gate behind attention, leading dense layers."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import gates, router
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.operations import attention
from vllm_cpp.models.registry import family

TRAITS = decoder.Traits(
    qk_norm=decoder.PER_HEAD,
    expert_scores=router.SIGMOID,
    reads_expert_scores=True,
    needs_expert_bias=True,
    normalize_experts=None,
    scale_experts=True,
    expert_width=decoder.expert_length,
    shared_width=decoder.shared_length,
)
_DEFAULT_PERIOD = 4


@family("laguna", streams_experts=True, places_experts=True)
def laguna(b: Builder, hp: HyperParameters) -> None:
    b.keys.integer("leading_dense_block_count")
    decoder.check_widths(b, hp)
    window = b.keys.integer("attention.sliding_window", 0)
    slides = decoder.sliding_layers(b, hp, _DEFAULT_PERIOD, full_first=True) if window else (False,) * hp.num_layers
    turn = decoder.rope_of(b, hp, TRAITS.rope_layout)
    near = decoder.near_rope(b, hp, hp.key_length, base=hp.rope.freq_base, scaling="none", attn_factor=1.0)
    turn_near = decoder.rope_of(b, hp, TRAITS.rope_layout, near) if any(slides) else turn

    def mixer(il: int, h: Rows) -> decoder.Mixed:
        by, seen = (turn_near, window) if slides[il] else (turn, 0)
        mixed = decoder.attention(b, hp, TRAITS, il, h, by, window=seen)
        attention.gate(b, mixed, gate_of(b, hp, il, h, mixed), gates.SOFTPLUS, hp.value_length)
        return decoder.Mixed(mixed, "attn_output")

    decoder.describe(b, hp, TRAITS, mixer=mixer)


def gate_of(b: Builder, hp: HyperParameters, il: int, h: Rows, mixed: Rows) -> Rows:
    """attn_gate · h: its rows say whether there is a gate a head, or one for each value."""
    name = f"blk.{il}.attn_gate.weight"
    info = b.model.tensors.get(name)
    width = mixed.width if info is not None and info.shape[0] == mixed.width else hp.num_heads[il]
    weight = b.weight(name, width, h.width)
    gate = b.rows(f"attention gate {width}", width, h.count)
    b.matmul(weight, h, gate)
    return gate
