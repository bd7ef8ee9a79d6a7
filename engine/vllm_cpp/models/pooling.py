"""Does a file embed texts or generate them?

Owns the key that decides it, and what is refused. Must not know how anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_cpp.gguf_file import GGUFModel
from vllm_cpp.gguf_file.hparams import Keys
from vllm_cpp.kernels.cpu import pooling
from vllm_cpp.models.registry import Family, pooling_architectures

_KEY, _CAUSAL = "pooling_type", "attention.causal"
_NONE, _RANK = 0, 4
_EXPECTED = "expected 1 (mean), 2 (first token) or 3 (last token)"


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a model makes one vector of a text. `causal`: a token sees those before it only, so that a text may be computed in pieces."""

    kind: int  # pooling.MEAN, CLS or LAST
    causal: bool


def read_pooling(model: GGUFModel, family: Family) -> Pooling | None:
    """How a file embeds; None for one that generates text. ModelLoadError naming the key where it can do neither."""
    keys = Keys(model)
    kind = keys.integer(_KEY, _NONE)
    causal = keys.boolean(_CAUSAL, not family.encodes)
    if kind == _NONE:
        if family.encodes:
            keys.refuse(_KEY, f"is missing or 0, and {family.architecture} is an encoder, which does nothing but embed: {_EXPECTED}")
        if not causal:
            keys.refuse(_CAUSAL, f"is false, but a model without {_KEY} generates text, for which a token must not see those after it")
        return None
    if kind == _RANK:
        keys.refuse(_KEY, f"is 4 (rank): reranking models are not built in this version; {_EXPECTED}, or 0 for text")
    if kind not in (pooling.MEAN, pooling.CLS, pooling.LAST):
        keys.refuse(_KEY, f"is {kind}; {_EXPECTED}, or 0 for text")
    if not (family.pools or family.encodes):
        keys.refuse(_KEY, f"is {kind}, and this version embeds with {', '.join(pooling_architectures())} only")
    if family.encodes and causal:
        keys.refuse(_CAUSAL, f"is true, but {family.architecture} is an encoder: every token of a text sees every other")
    return Pooling(kind, causal)
