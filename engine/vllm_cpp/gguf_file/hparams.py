"""Hyper-parameters of the attention families, typed, defaulted and checked.

Owns the keys that say what a model's layers look like, and the checks that need keys only. Must not know families: what a missing
expert width or gating function means is for models/ to decide, so these stay 0 or None here. Tensor shapes are checked there too, by
GGUFModel.need().
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

from vllm_cpp.gguf_file.model import GGUFModel
from vllm_cpp.gguf_file.values import REQUIRED
from vllm_cpp.gguf_file.vocabulary import check_vocabulary

# Bounds on what sizes tables here and in models/. Far above any published model.
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How positions turn queries and keys. `factor` is 1 where nothing is scaled."""

    dimension_count: int  # how many leading values of a head turn
    freq_base: float
    scaling: str  # one of ROPE_SCALINGS
    factor: float
    original_context_length: int
    attn_factor: float


@dataclass(frozen=True, kw_only=True)
class HyperParameters:
    """Per-layer tuples have `block_count` entries; of those layers the first `num_layers` run (the rest predict further tokens)."""

    architecture: str
    vocab_size: int
    context_length: int
    embedding_length: int
    block_count: int
    num_layers: int
    feed_forward_length: tuple[int, ...]  # 0: not said
    num_heads: tuple[int, ...]
    num_kv_heads: tuple[int, ...]
    key_length: int
    value_length: int
    rms_epsilon: float
    rope: Rope
    num_experts: int  # 0: a dense model
    top_k: tuple[int, ...]
    expert_feed_forward_length: tuple[int, ...]  # 0: not said
    num_shared_experts: int
    shared_expert_feed_forward_length: int  # 0: not said
    expert_weights_scale: float  # 0 and 1: no scaling
    expert_weights_norm: bool
    expert_gating_func: int | None  # 1 softmax, 2 sigmoid, 3 softmax over the chosen, 4 sqrt(softplus)
    num_expert_groups: int
    num_expert_groups_used: int
    num_leading_dense_layers: int


class Keys:
    """The architecture's keys, with range checks that name the key."""

    def __init__(self, model: GGUFModel) -> None:
        self.kv = model.kv
        self.prefix = model.architecture + "."

    def integer(self, key: str, default: Any = REQUIRED, least: int = 0, most: int = (1 << 31) - 1) -> Any:
        value = self.kv.get_u32(self.prefix + key, default)
        if value is not None and not least <= value <= most:
            self.refuse(key, f"is {value}, expected {least} to {most}")
        return value

    def number(self, key: str, default: Any = REQUIRED, positive: bool = True) -> float:
        value = self.kv.get_f32(self.prefix + key, default)
        if value < 0 or (positive and value == 0):
            self.refuse(key, f"is {value}, expected a number {'above' if positive else 'of at least'} 0")
        return value

    def per_layer(self, key: str, layers: int, default: Any = REQUIRED, least: int = 0, most: int = (1 << 31) - 1) -> tuple[int, ...]:
        """One number for all layers, or an array with one for each."""
        full = self.prefix + key
        if not self.kv.is_array(full):
            return (self.integer(key, default, least, most),) * layers
        values = self.kv.get_array(full, "int")
        if len(values) != layers:
            self.refuse(key, f"has {len(values)} elements, but block_count is {layers}")
        if values.min() < least or values.max() > most:
            self.refuse(key, f"holds {values.min()} to {values.max()}, expected {least} to {most}")
        return tuple(values.tolist())

    def numbers_per_layer(self, key: str, layers: int, default: Any = REQUIRED) -> tuple[float, ...]:
        """One number of at least 0 for all layers, or an array (f32) with one for each."""
        full = self.prefix + key
        if not self.kv.is_array(full):
            return (self.number(key, default, positive=False),) * layers
        values = self.kv.get_array(full, "f32")
        if len(values) != layers:
            self.refuse(key, f"has {len(values)} elements, but block_count is {layers}")
        if not values.min() >= 0:
            self.refuse(key, f"holds {values.min()}, expected numbers of at least 0")
        return tuple(values.tolist())

    def boolean(self, key: str, default: Any = REQUIRED) -> Any:
        return self.kv.get_bool(self.prefix + key, default)

    def string(self, key: str, default: Any = REQUIRED) -> Any:
        return self.kv.get_str(self.prefix + key, default)

    def flags(self, key: str, layers: int) -> tuple[bool, ...] | None:
        """An array of one bool a layer; None where the key is missing."""
        if self.prefix + key not in self.kv:
            return None
        values = self.kv.get_array(self.prefix + key, "bool")
        if len(values) != layers:
            self.refuse(key, f"has {len(values)} elements, but block_count is {layers}")
        return tuple(bool(value) for value in values)

    def refuse(self, key: str, text: str) -> None:
        raise self.kv.error(self.prefix + key, text)


def read_hyper_parameters(model: GGUFModel) -> HyperParameters:
    """Everything the attention families need, or a ModelLoadError that names the key."""
    keys = Keys(model)
    layers, nextn = _layers(model)
    embedding = keys.integer("embedding_length", least=1)
    heads = keys.per_layer("attention.head_count", layers, least=1)
    kv_heads = _kv_heads(keys, layers, heads)
    key_length = _head_length(keys, "attention.key_length", embedding, heads[0])
    context = keys.integer("context_length", least=1)
    num_experts = keys.integer("expert_count", 0, most=MAX_EXPERTS)
    groups, groups_used = _groups(keys, num_experts)
    return HyperParameters(
        architecture=model.architecture,
        vocab_size=check_vocabulary(model),
        context_length=context,
        embedding_length=embedding,
        block_count=layers,
        num_layers=layers - nextn,
        feed_forward_length=keys.per_layer("feed_forward_length", layers, 0),
        num_heads=heads,
        num_kv_heads=kv_heads,
        key_length=key_length,
        value_length=_head_length(keys, "attention.value_length", embedding, heads[0]),
        rms_epsilon=_epsilon(keys),
        rope=_rope(keys, key_length, context),
        num_experts=num_experts,
        top_k=_top_k(keys, layers, num_experts),
        expert_feed_forward_length=keys.per_layer("expert_feed_forward_length", layers, 0),
        num_shared_experts=keys.integer("expert_shared_count", 0, most=MAX_EXPERTS),
        shared_expert_feed_forward_length=keys.integer("expert_shared_feed_forward_length", 0),
        expert_weights_scale=keys.number("expert_weights_scale", 0.0, positive=False),
        expert_weights_norm=model.get_bool(keys.prefix + "expert_weights_norm", False),
        expert_gating_func=keys.integer("expert_gating_func", None, least=1, most=4),
        num_expert_groups=groups,
        num_expert_groups_used=groups_used,
        num_leading_dense_layers=keys.integer("leading_dense_block_count", 0, most=layers),
    )


def read_num_layers(model: GGUFModel) -> int:
    """How many layers run, of a file of any architecture; refused in the same words."""
    layers, nextn = _layers(model)
    return layers - nextn


def without_drafts(model: GGUFModel) -> GGUFModel:
    """The file as if it had no tensors of layers that only predict further tokens: nobody who counts, copies or expands what a model has
    need know of them. Its files are those of `model`, which has to stay open."""
    running = copy.copy(model)
    num_layers = read_num_layers(model)
    running.tensors = {name: info for name, info in model.tensors.items() if (_layer_of(name) or 0) < num_layers}
    return running


def _layer_of(name: str) -> int | None:
    """The layer a tensor belongs to, by its name."""
    found = re.match(r"blk\.(\d+)\.", name)
    return None if found is None else int(found[1])


def _layers(model: GGUFModel) -> tuple[int, int]:
    """Layers the file has, and how many of them, the last ones, only predict further tokens. A file converted without those may keep the
    key that counts them: its layers all run."""
    keys = Keys(model)
    layers = keys.integer("block_count", least=1, most=MAX_LAYERS)
    nextn = keys.integer("nextn_predict_layers", 0)
    if nextn >= layers:
        keys.refuse("nextn_predict_layers", f"is {nextn}, expected fewer than block_count, {layers}")
    first = f"blk.{layers - nextn}"
    if f"{first}.attn_norm.weight" in model.tensors and f"{first}.nextn.eh_proj.weight" not in model.tensors:
        nextn = 0
    return layers, nextn


def _kv_heads(keys: Keys, layers: int, heads: tuple[int, ...]) -> tuple[int, ...]:
    key = "attention.head_count_kv"
    if keys.prefix + key not in keys.kv:
        return heads
    kv_heads = keys.per_layer(key, layers)  # 0: a layer without attention
    for il, (q, kv) in enumerate(zip(heads, kv_heads, strict=True)):
        if kv and q % kv:
            keys.refuse(key, f"is {kv} in layer {il}, which does not divide attention.head_count, {q}")
    return kv_heads


def _epsilon(keys: Keys) -> float:
    """Of norms by the root mean square; a file that has none may have the other norm's only."""
    other = "attention.layer_norm_epsilon"
    if keys.prefix + other in keys.kv and keys.prefix + "attention.layer_norm_rms_epsilon" not in keys.kv:
        return keys.number(other)
    return keys.number("attention.layer_norm_rms_epsilon")


def _head_length(keys: Keys, key: str, embedding: int, heads: int) -> int:
    length = keys.integer(key, None, least=1)
    if length is not None:
        return length
    if embedding % heads:
        keys.refuse(key, f"missing, and embedding_length, {embedding}, is not a multiple of attention.head_count, {heads}")
    return embedding // heads


def _rope(keys: Keys, key_length: int, context: int) -> Rope:
    turning = keys.integer("rope.dimension_count", key_length, least=1)
    if turning > key_length or turning % 2:
        keys.refuse("rope.dimension_count", f"is {turning}, expected an even number up to the head's length, {key_length}")
    scaling = keys.kv.get_str(keys.prefix + "rope.scaling.type", "linear")
    if scaling not in ROPE_SCALINGS:
        keys.refuse("rope.scaling.type", f"is {scaling!r}, expected one of {', '.join(ROPE_SCALINGS)}")
    factor = keys.number("rope.scaling.factor", None, positive=False) if keys.prefix + "rope.scaling.factor" in keys.kv else None
    if factor is None:
        factor = keys.number("rope.scale_linear", 1.0, positive=False)  # the key's old name
    return Rope(
        dimension_count=turning,
        freq_base=keys.number("rope.freq_base", 10000.0),
        scaling=scaling,
        factor=1.0 if scaling == "none" else factor or 1.0,
        original_context_length=keys.integer("rope.scaling.original_context_length", context, least=1),
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
    )


def _top_k(keys: Keys, layers: int, num_experts: int) -> tuple[int, ...]:
    key = "expert_used_count"
    top_k = keys.per_layer(key, layers, 0)
    if max(top_k) > num_experts:
        keys.refuse(key, f"is {max(top_k)}, but expert_count is {num_experts}")
    if num_experts and max(top_k) < 1:
        keys.refuse(key, f"is {max(top_k)}, expected 1 to expert_count, {num_experts}")
    return top_k


def _groups(keys: Keys, num_experts: int) -> tuple[int, int]:
    groups = keys.integer("expert_group_count", 0, most=max(num_experts, 1))
    used = keys.integer("expert_group_used_count", 0)
    if groups > 1 and (num_experts % groups or not 1 <= used <= groups):
        keys.refuse(
            "expert_group_count",
            f"is {groups}, of which {used} are used (expert_group_used_count): expected a divisor of expert_count, {num_experts}, "
            f"and 1 to {groups} used",
        )
    return groups, used
