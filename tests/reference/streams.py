"""Residual streams, compressed entries and attention over them in plain numpy and float64: what the kernels of streams.py and compressed.py
are compared with."""

from __future__ import annotations

import numpy as np

from tests.reference.ops import sigmoid, softmax


def coefficients(mix, scale, base, epsilon, iterations):
    """mix [24] -> what is read of each stream [4], what each gets [4], what goes from stream to stream [source, destination]."""
    pre = sigmoid(mix[:4] * scale[0] + base[:4]) + epsilon
    post = 2 * sigmoid(mix[4:8] * scale[1] + base[4:8])
    comb = softmax((mix[8:] * scale[2] + base[8:]).reshape(4, 4)) + epsilon
    comb = comb / (comb.sum(0) + epsilon)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(1, keepdims=True) + epsilon)
        comb = comb / (comb.sum(0) + epsilon)
    return pre, post, comb
