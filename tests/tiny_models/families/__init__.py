"""The tiny models, one function a family, one file a kind of layer.

Owns shapes and keys; what is computed with them is in the engine's models/. Size 0 is the smallest model worth looking at (where layers
are plain attention, with widths that fit every encoding); size 1 has other head counts, an odd number of experts, another top-k, another
pattern of layers, other optional tensors, and rows that do not fill blocks of 256. The gains are chosen so that logits are neither flat
nor saturated, and the choice of experts is clear. `arch-variant` is the same architecture with another set of tensors. The order of keys
and tensors is part of the recordings: a changed order changes the bytes.
"""

from . import delta, experts, hyper, latent, plain, state_space, windows  # noqa: F401 - importing them registers their families
from .parts import FAMILIES

__all__ = ["FAMILIES"]
