"""Tiny GGUF models from a seed, small but complete: keys, vocabulary, weights in any encoding.

Every byte follows from (family, seed, size, dtype), so that what llama.cpp computed for a model can be recorded once (vectors/logits) and
the model itself need not be kept. `dtype` is an encoding's name, or "mix" for the mixture a quantizer would write.

    python -m tiny_models qwen3moe out.gguf --seed 1 --size 0 --dtype mix       (from tests/, with engine/ on the path)
"""

from .families import FAMILIES
from .model import Outline, TinyModel

__all__ = ["FAMILIES", "TinyModel", "build", "outline"]


def build(family: str, seed: int = 1, size: int = 0, dtype: str = "F32") -> TinyModel:
    """The model of a family, not yet written."""
    arch, describe = FAMILIES[family]
    model = TinyModel(arch, seed, dtype)
    describe(model, size)
    return model


def outline(family: str, size: int = 0) -> TinyModel:
    """The same without weights: to ask what a family has."""
    arch, describe = FAMILIES[family]
    model = Outline(arch, 0, "F32")
    describe(model, size)
    return model
