"""Which architectures can be run, and what each family is able to do.

Owns the table from `general.architecture` to a family. Must not know how a family computes: the family files register themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import GGUFModel
from vllm_cpp.gguf_file.hparams import HyperParameters


class KvShape(NamedTuple):
    """What one layer keeps of a token, in each of so many heads: a key and a value."""

    num_kv_heads: int
    key_length: int
    value_length: int


KvShapes = Callable[[GGUFModel, HyperParameters], list[KvShape | None]]


def attention_everywhere(model: GGUFModel, hp: HyperParameters) -> list[KvShape | None]:
    """Ordinary attention in every layer."""
    for il, n in enumerate(hp.num_kv_heads[: hp.num_layers]):
        if n == 0:
            raise ModelLoadError(
                f"{model.path}: key '{hp.architecture}.attention.head_count_kv' is 0 in layer {il}; {hp.architecture} needs one or more"
            )
    return [KvShape(hp.num_kv_heads[il], hp.key_length, hp.value_length) for il in range(hp.num_layers)]


def attention_where_heads(model: GGUFModel, hp: HyperParameters) -> list[KvShape | None]:  # noqa: ARG001 - every KvShapes takes both
    """Ordinary attention in the layers that attention.head_count_kv gives heads; the others keep no keys."""
    return [KvShape(n, hp.key_length, hp.value_length) if n else None for n in hp.num_kv_heads[: hp.num_layers]]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. `describe(builder, hyper_parameters)` appends its operations; `kv_shapes` says what its layers keep of a token,
    None for one that keeps nothing; the flags are capabilities that configuration asks about."""

    architecture: str
    describe: Callable[[Any, Any], None]
    kv_shapes: KvShapes = attention_everywhere
    streams_experts: bool = False  # routed experts are read through the slot seam
    places_experts: bool = False  # routed experts of a layer can be computed on another device than the rest
    consults_weight_offloader: bool = False
    state_grows: bool = False  # its recurrent state has room for the longest sequence, so max_model_len costs memory
    pools: bool = False  # embeds, where the file declares how its hidden states are pooled; else it generates text
    encodes: bool = False  # does nothing but embed: every token of a text sees every other


_FAMILIES: dict[str, Family] = {}


def family(architecture: str, **traits: Any) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    """Register the decorated `describe` under an architecture name."""

    def register(describe: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        _FAMILIES[architecture] = Family(architecture, describe, **traits)
        return describe

    return register


def supported() -> list[str]:
    """Architectures this build can run, sorted."""
    from vllm_cpp.models import families  # noqa: F401 - importing them registers them

    return sorted(_FAMILIES)


def pooling_architectures() -> list[str]:
    """Those that can embed, sorted."""
    return [name for name in supported() if _FAMILIES[name].pools or _FAMILIES[name].encodes]


def find(architecture: str) -> Family:
    """The family of an architecture; ModelLoadError naming it and all supported ones."""
    names = supported()
    if architecture not in _FAMILIES:
        raise ModelLoadError(f"architecture {architecture!r} is not supported; this build runs {', '.join(names)}")
    return _FAMILIES[architecture]
