"""What of a file has to be held somewhere: every weight of the layers that run, towers told from the rest.

Owns: which tensors are routed-expert towers and which layer a tensor belongs to, by name. Must not know where anything is put, nor what an
architecture computes: a file of an architecture that cannot be run is counted as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vllm_cpp.gguf_file import GGUFModel, TensorInfo
from vllm_cpp.gguf_file.hparams import read_num_layers

_TOWER: Final = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_(?:ch|)exps\.weight")
_LAYER: Final = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor. `layer` is None for what stands outside the layers; `num_experts` is 0 for what is no tower."""

    name: str
    layer: int | None
    encoding: str
    n_bytes: int
    num_values: int
    num_experts: int = 0

    @property
    def slice_bytes(self) -> int:
        """Bytes of one expert's slice; only of a tower."""
        return self.n_bytes // self.num_experts


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The weights of one file, in its order, without those of layers that only predict further tokens."""

    architecture: str
    num_layers: int
    weights: tuple[Weight, ...]
    top_k: Mapping[int, int]  # experts that a token uses, by layer

    @property
    def towers(self) -> dict[int, list[Weight]]:
        """The routed-expert towers of each layer that has any."""
        layers: dict[int, list[Weight]] = {}
        for weight in self.weights:
            if weight.num_experts:
                layers.setdefault(int(weight.layer or 0), []).append(weight)
        return dict(sorted(layers.items()))


def weight_of(tensor: TensorInfo) -> Weight:
    """What a tensor is, by its name and shape."""
    tower, layer = _TOWER.fullmatch(tensor.name), _LAYER.match(tensor.name)
    return Weight(
        name=tensor.name,
        layer=None if layer is None else int(layer[1]),
        encoding=tensor.encoding.name,
        n_bytes=tensor.n_bytes,
        num_values=math.prod(tensor.shape),
        num_experts=tensor.shape[0] if tower is not None and len(tensor.shape) == 3 else 0,
    )


def take(model: GGUFModel) -> Inventory:
    """The inventory of an opened file. ModelLoadError where its keys do not say how many layers run."""
    num_layers = read_num_layers(model)
    counted = (weight_of(tensor) for tensor in model.tensors.values())
    weights = tuple(weight for weight in counted if weight.layer is None or weight.layer < num_layers)
    return Inventory(
        architecture=model.architecture,
        num_layers=num_layers,
        weights=weights,
        top_k=_top_k(model, sorted({int(weight.layer or 0) for weight in weights if weight.num_experts})),
    )


def _top_k(model: GGUFModel, layers: list[int]) -> dict[int, int]:
    """Of the layers that have towers: one number for all, or an array with one for each layer of the file."""
    key = f"{model.architecture}.expert_used_count"
    if not model.kv.is_array(key):
        return dict.fromkeys(layers, model.get_u32(key, 0))
    values = model.get_array(key, "int")
    return {layer: int(values[layer]) for layer in layers if layer < len(values)}
