"""qwen35 (dense), qwen35moe and qwen3next: delta-rule layers, and every so often attention behind an output gate."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import GGUFModel
from vllm_cpp.gguf_file.hparams import HyperParameters, Keys
from vllm_cpp.kernels.cpu import gates, recurrent, rope
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.operations import attention, recurrence
from vllm_cpp.models.registry import KvShape, family

TRAITS = decoder.Traits(
    ffn_norm="post_attention_norm",
    expert_width=decoder.expert_width_or_share,
    shared_width=decoder.shared_length_or_dense,
    gated_shared_expert=True,
)
_DEFAULT_INTERVAL = 4


def recurrent_layers(keys: Keys, hp: HyperParameters) -> tuple[bool, ...]:
    """Which layers have the delta rule: an array says so, or all but every n-th."""
    said = keys.flags("attention.recurrent_layers", hp.block_count)
    interval = keys.integer("full_attention_interval", _DEFAULT_INTERVAL, least=1)
    return said or tuple((il + 1) % interval != 0 for il in range(hp.block_count))


def kv_shapes(model: GGUFModel, hp: HyperParameters) -> list[KvShape | None]:
    """Keys and values in the layers with attention."""
    keys, shapes = Keys(model), []
    for il, is_recurrent in enumerate(recurrent_layers(keys, hp)[: hp.num_layers]):
        if not is_recurrent and not hp.num_kv_heads[il]:
            keys.refuse("attention.head_count_kv", f"is 0 for layer {il}, which has attention")
        shapes.append(None if is_recurrent else KvShape(hp.num_kv_heads[il], hp.key_length, hp.value_length))
    return shapes


@family("qwen35", kv_shapes=kv_shapes)
@family("qwen35moe", kv_shapes=kv_shapes, streams_experts=True, places_experts=True)
def qwen35(b: Builder, hp: HyperParameters) -> None:
    _describe(b, hp, turned_pairs(b.keys, hp.rope.dimension_count // 2), grouped=False)


@family("qwen3next", kv_shapes=kv_shapes, streams_experts=True, places_experts=True)
def qwen3next(b: Builder, hp: HyperParameters) -> None:
    _describe(b, hp, np.ones(hp.rope.dimension_count // 2, bool), grouped=True)


def turned_pairs(keys: Keys, half: int) -> np.ndarray:
    """Which pairs turn in text, where all positions of a token but the fourth are the same and that is 0 (FAMILIES: qwen35, Sections)."""
    name = "rope.dimension_sections"
    sections = keys.kv.get_array(keys.prefix + name, "int")
    if len(sections) != 4 or sections.min() < 0 or sections.sum() <= 0:
        keys.refuse(name, f"is {sections.tolist()}, expected four numbers of pairs")
    place = np.arange(half) % sections.sum()
    return place < 3 * sections[place % 3]


def _describe(b: Builder, hp: HyperParameters, turned: np.ndarray, *, grouped: bool) -> None:
    shape = recurrence.delta_shape(b.keys, "ssm.group_count", "ssm.time_step_rank", "ssm.state_size", grouped=grouped)
    if b.keys.integer("ssm.inner_size") != shape.values:
        b.keys.refuse("ssm.inner_size", f"is not ssm.time_step_rank times ssm.state_size, {shape.num_heads} times {shape.width}")
    is_recurrent = recurrent_layers(b.keys, hp)
    by = decoder.rope_of(b, hp, rope.NEOX, turned=turned) if not all(is_recurrent[: hp.num_layers]) else None

    def mixer(il: int, h: Rows) -> decoder.Mixed:
        if is_recurrent[il]:
            return decoder.Mixed(delta_net(b, hp, il, h, shape), "ssm_out")
        return decoder.Mixed(gated_attention(b, hp, il, h, by), "attn_output")

    decoder.describe(b, hp, TRAITS, mixer=mixer)


def gated_attention(b: Builder, hp: HyperParameters, il: int, h: Rows, by: attention.Turn | None) -> Rows:
    """Attention times sigmoid(gate); attn_q holds a head's query rows, then its gate rows."""
    d, num_heads, num_kv_heads = hp.key_length, hp.num_heads[il], hp.num_kv_heads[il]
    if hp.value_length != d:
        raise ModelLoadError(f"attention.value_length is {hp.value_length}, expected {d}, attention.key_length, for {hp.architecture}")
    both, k, v = decoder.project(b, il, h, q=2 * num_heads * d, k=num_kv_heads * d, v=num_kv_heads * d)
    q, gate = (attention.Heads(both, num_heads, d, 2 * d, first) for first in (0, d))
    attention.rope_and_store(
        b, il, q, k, v, by=by, q_norm=b.vector(f"blk.{il}.attn_q_norm.weight", d), k_norm=b.vector(f"blk.{il}.attn_k_norm.weight", d),
        eps=hp.rms_epsilon,
    )  # fmt: skip
    mixed = b.rows("attention", num_heads * d, h.count)
    attention.attention(b, il, q, mixed, d**-0.5)
    attention.gate(b, mixed, gate, gates.SIGMOID, d)
    return mixed


def delta_net(b: Builder, hp: HyperParameters, il: int, h: Rows, shape: recurrence.DeltaShape) -> Rows:
    """rmsnorm(delta rule of the convolved q, k, v) * silu(z)."""
    name, mixed, d = f"blk.{il}", 2 * shape.keys + shape.values, shape.width
    taps = recurrence.taps_of(b, f"{name}.ssm_conv1d.weight", mixed, b.keys.integer("ssm.conv_kernel", least=1))
    decay = recurrence.decay_of(b, f"{name}.ssm_a", f"{name}.ssm_dt.bias", shape.num_heads, shape.num_heads)
    norm = b.vector(f"{name}.ssm_norm.weight", d)
    parts = project_delta(b, il, h, shape)
    convolved, out = b.rows("convolved q, k, v", mixed, h.count), b.rows("delta rule", shape.values, h.count)
    recurrence.convolution(b, parts.qkv, taps, convolved, silu=True)
    q, k = (recurrence.columns(convolved, first, shape.keys) for first in (0, shape.keys))
    v = recurrence.columns(convolved, 2 * shape.keys, shape.values)
    recurrence.delta_rule(b, shape, q, k, v, v, alpha=parts.alpha, decay=decay, beta=parts.beta, eps=hp.rms_epsilon)
    recurrence.gated_norm(b, v, d, norm, hp.rms_epsilon, parts.z, recurrent.SILU, out)
    return out


class Projected(NamedTuple):
    qkv: Rows
    z: Rows
    beta: Rows
    alpha: Rows


def project_delta(b: Builder, il: int, h: Rows, shape: recurrence.DeltaShape) -> Projected:
    """What a delta layer makes of h: q, k and v side by side, z, beta and alpha. Files have one matrix for each, or (qwen3next) fused ones
    in which a key head's parts stand together."""
    name, mixed, share = f"blk.{il}", 2 * shape.keys + shape.values, shape.num_heads // shape.num_key_heads
    if f"{name}.ssm_in.weight" in b.model.tensors:
        fused = recurrence.side_by_side(b, h, "q, k, v, z by head", {f"{name}.ssm_in": mixed + shape.values})
        parts = b.rows("q, k, v, z", mixed + shape.values, h.count)
        recurrence.rearranged(b, fused, parts, shape.width, _in_kinds(shape.num_key_heads, (1, 1, share, share)))
    else:
        matrices = {f"{name}.attn_qkv": mixed, f"{name}.attn_gate": shape.values}
        parts = recurrence.side_by_side(b, h, "q, k, v, z", matrices, barrier=False)
    if f"{name}.ssm_ba.weight" in b.model.tensors:
        fused = recurrence.side_by_side(b, h, "beta, alpha by head", {f"{name}.ssm_ba": 2 * shape.num_heads})
        gated = b.rows("beta, alpha", 2 * shape.num_heads, h.count)
        recurrence.rearranged(b, fused, gated, share, _in_kinds(shape.num_key_heads, (1, 1)))
    else:
        matrices = {f"{name}.ssm_beta": shape.num_heads, f"{name}.ssm_alpha": shape.num_heads}
        gated = recurrence.side_by_side(b, h, "beta, alpha", matrices)
    qkv, z = recurrence.columns(parts, 0, mixed, "q, k, v"), recurrence.columns(parts, mixed, shape.values, "z")
    beta, alpha = (recurrence.columns(gated, first, shape.num_heads, part) for part, first in (("beta", 0), ("alpha", shape.num_heads)))
    return Projected(qkv, z, beta, alpha)


def _in_kinds(num_heads: int, blocks: tuple[int, ...]) -> list[int]:
    """Of rows that hold, head by head, so many blocks of each kind: the blocks kind by kind."""
    a_head = sum(blocks)
    order = []
    first = 0
    for n in blocks:
        order += [head * a_head + first + i for head in range(num_heads) for i in range(n)]
        first += n
    return order
