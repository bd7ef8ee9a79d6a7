"""Recurrent operations in plain numpy and float64, one token after another, to compare kernels with.

Owns clarity. Must not know how the kernels do it: no runs, tiles, vectors or threads here.
"""

from __future__ import annotations

import numpy as np

from tests.reference.ops import sigmoid


def silu(x):
    return x * sigmoid(x)


def convolution(x, weight, bias=0.0):
    """x [tokens, channels], weight [channels, taps]: before the first token everything is zero."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), np.asarray(x, np.float64)])
    return np.array([sum(padded[t + k] * weight[:, k] for k in range(taps)) for t in range(len(x))]) + bias
