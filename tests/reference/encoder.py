"""What encoders and pooling compute, in plain numpy and float64."""

from __future__ import annotations

import numpy as np

from .ops import softmax


def layernorm(x, weight, bias, eps):
    x = np.asarray(x, np.float64)
    middle = x - x.mean(-1, keepdims=True)
    return middle / np.sqrt(np.mean(middle * middle, -1, keepdims=True) + eps) * weight + bias


def text_attention(q, k, v, scale):
    """q [n, heads, d], k and v [n, kv heads, d] of one text; every token sees every other."""
    group = q.shape[1] // k.shape[1]
    out = np.empty(q.shape, np.float64)
    for head in range(q.shape[1]):
        weights = softmax(q[:, head].astype(np.float64) @ k[:, head // group].T * scale)
        out[:, head] = weights @ v[:, head // group]
    return out


def pooled(rows, kind):
    """rows [n, width] of one text; kind "mean", "cls" or "last"."""
    rows = np.asarray(rows, np.float64)
    one = {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[kind]
    return one / max(np.linalg.norm(one), 1e-30)
