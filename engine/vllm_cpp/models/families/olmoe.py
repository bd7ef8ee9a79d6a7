"""olmoe: q and k normed over the whole row, experts not normalized, a head of its own."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder
from vllm_cpp.models.registry import family

TRAITS = decoder.Traits(qk_norm=decoder.WHOLE_ROW, tied_head=False, normalize_experts=False)


@family("olmoe", streams_experts=True, places_experts=True)
def olmoe(b: Builder, hp: HyperParameters) -> None:
    decoder.describe(b, hp, TRAITS)
