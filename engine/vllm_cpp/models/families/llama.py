"""llama: dense, and with experts (Mixtral). Rope over neighbouring pairs; every bias optional."""

from __future__ import annotations

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import rope
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder
from vllm_cpp.models.registry import family

TRAITS = decoder.Traits(rope_layout=rope.NEIGHBOURS, output_bias=True, ffn_bias=True)


@family("llama", streams_experts=True, places_experts=True, pools=True)
def llama(b: Builder, hp: HyperParameters) -> None:
    turns_whole_heads(hp)
    decoder.describe(b, hp, TRAITS)


def turns_whole_heads(hp: HyperParameters) -> None:
    """Refuse a model that would turn a part of each head."""
    turning, name = hp.rope.dimension_count, hp.architecture
    if turning != hp.key_length:
        raise ModelLoadError(f"{name}.rope.dimension_count is {turning}; {name} turns whole heads, expected {hp.key_length}")
