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


def turn(x, position, angles):
    """Neighbouring pairs of the last values of x turn by position * angle."""
    y, n = np.array(x, np.float64), 2 * len(angles)
    a, b, cos, sin = y[..., -n::2].copy(), y[..., 1 - n :: 2].copy(), np.cos(position * angles), np.sin(position * angles)
    y[..., -n::2], y[..., 1 - n :: 2] = a * cos - b * sin, a * sin + b * cos
    return y


def entries(values, weights, ape, ratio, overlap, norm, epsilon, angles):
    """One entry for each complete block of `ratio` tokens: values, weights [tokens, w] or (overlap) [tokens, 2 w]."""
    out, width = [], len(norm)
    for start in range(0, len(values) - ratio + 1, ratio):
        own = slice(start, start + ratio)
        v, z = values[own, -width:], (weights[own] + ape)[:, -width:]
        if overlap and start:
            before = slice(start - ratio, start)
            v, z = np.concatenate([values[before, :width], v]), np.concatenate([(weights[before] + ape)[:, :width], z])
        entry = (softmax(z.T).T * v).sum(0)
        entry = entry / np.sqrt(np.mean(entry * entry) + epsilon) * norm
        out.append(turn(entry, start, angles))
    return np.array(out).reshape(-1, width)


def best_blocks(q, weights, keys, factor, top):
    """q [heads, d], weights [heads], keys [blocks, d]: the blocks with the highest scores, rising."""
    scores = factor * (weights @ np.maximum(q @ keys.T, 0))
    return np.sort(np.argsort(-scores, kind="stable")[:top])


def attend(q, rows, scale, sinks):
    """q [heads, d] over rows [n, d], key and value at once; a sink a head."""
    scores = np.concatenate([q @ rows.T * scale, sinks[:, None]], 1)
    return softmax(scores)[:, :-1] @ rows
