"""llama: dense, and with experts (Mixtral). Rope over neighbouring pairs; every bias optional."""

from __future__ import annotations

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import rope
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder
from vllm_cpp.models.registry import family

TRAITS = decoder.Traits(rope_layout=rope.NEIGHBOURS, output_bias=True, ffn_bias=True)


@family("llama", streams_experts=True)
def llama(b: Builder, hp: HyperParameters) -> None:
    if hp.rope.dimension_count != hp.key_length:
        raise ModelLoadError(f"llama.rope.dimension_count is {hp.rope.dimension_count}; llama turns whole heads, expected {hp.key_length}")
    decoder.describe(b, hp, TRAITS)
