"""From a row of logits to a token, and from tokens to text.

Owns: penalties, filters, the draw and its random numbers, stop strings. Must not know requests, batches, threads or the model.
"""

from .sampler import Sampler
from .text import StopScanner, TextStream

__all__ = ["Sampler", "StopScanner", "TextStream"]
