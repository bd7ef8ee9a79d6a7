"""bailingmoe2: Ling and Ring. One matrix for q, k and v, a part of each head turned; dense layers first, then experts chosen within the
best groups, beside a shared one."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder
from vllm_cpp.models.registry import family


def _shared_width(hp: HyperParameters, il: int) -> int:
    return (hp.shared_expert_feed_forward_length or hp.expert_feed_forward_length[il]) * hp.num_shared_experts


TRAITS = decoder.Traits(
    qk_norm=decoder.PER_HEAD,
    tied_head=False,
    expert_scores=None,
    normalize_experts=None,
    scale_experts=True,
    expert_width=decoder.expert_length,
    shared_width=_shared_width,
)


@family("bailingmoe2", streams_experts=True, places_experts=True)
def bailingmoe2(b: Builder, hp: HyperParameters) -> None:
    decoder.describe(b, hp, TRAITS)
