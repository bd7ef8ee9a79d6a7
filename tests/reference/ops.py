"""The operations of a layer in plain numpy and float64, one obvious line at a time, to compare kernels with.

Owns clarity. Must not know how the kernels do it: no blocks, chunks, vectors or threads here.
"""

from __future__ import annotations

import numpy as np


def sigmoid(z):
    return 1 / (1 + np.exp(-np.asarray(z, np.float64)))


def swiglu(gate, up):
    return gate * sigmoid(gate) * up


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rmsnorm(x, weight, eps):
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def rope_angles(half, base, factor=1.0, yarn=None, divisors=None):
    """Angle a position for each pair; yarn is None or (original context, beta_fast, beta_slow)."""
    rot, angles = 2 * half, []
    for i in range(half):
        angle = base ** (-2.0 * i / rot) / (1.0 if divisors is None else divisors[i])
        turned = angle / factor
        if yarn:
            original, fast, slow = yarn
            low = max(0, np.floor(rot * np.log(original / (fast * 2 * np.pi)) / (2 * np.log(base))))
            high = min(rot - 1, np.ceil(rot * np.log(original / (slow * 2 * np.pi)) / (2 * np.log(base))))
            ramp = 1 - min(1, max(0, (i - low) / max(0.001, high - low)))
            turned = turned * (1 - ramp) + angle * ramp
        angles.append(turned)
    return np.array(angles)


def rope(x, positions, angles, magnitude, neighbours):
    """x [tokens, heads, d]: the first 2 * len(angles) values of each head turn by position * angle."""
    half, y = len(angles), np.array(x, np.float64)
    for t, position in enumerate(positions):
        for i, angle in enumerate(angles):
            first, second = (2 * i, 2 * i + 1) if neighbours else (i, i + half)
            cos, sin = np.cos(position * angle) * magnitude, np.sin(position * angle) * magnitude
            a, b = np.array(x[t, :, first], np.float64), np.array(x[t, :, second], np.float64)
            y[t, :, first], y[t, :, second] = a * cos - b * sin, a * sin + b * cos
    return y


def attention(q, k, v, positions, scale):
    """q [tokens, heads, d] at `positions` over k, v [context, kv heads, d] of the same sequence; a query sees keys 0 .. its position."""
    out = np.zeros(q.shape)
    share = q.shape[1] // k.shape[1]
    for t, position in enumerate(positions):
        for head in range(q.shape[1]):
            keys, values = (
                np.asarray(k[: position + 1, head // share], np.float64),
                np.asarray(v[: position + 1, head // share], np.float64),
            )
            out[t, head] = softmax(keys @ q[t, head].astype(np.float64) * scale) @ values
    return out


def group_by_expert(ids, num_experts):
    """Flat expert ids of all pairs -> where each expert's run starts [experts + 1], and the pairs in that order."""
    offsets = [0] + [int(np.sum(ids <= e)) for e in range(num_experts)]
    return np.array(offsets), np.array([pair for e in range(num_experts) for pair, chosen in enumerate(ids) if chosen == e])
