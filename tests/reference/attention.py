"""Attention with all that families add to it, and gates, in plain numpy and float64.

Owns clarity. Must not know how the kernels do it: no blocks, chunks, vectors or threads here.
"""

from __future__ import annotations

import numpy as np

from tests.reference import ops


def attention(q, k, v, positions, scale, window=0, sinks=None, temperature=0.0, temperature_context=1):
    """q [tokens, heads, d] at `positions` over k [context, kv heads, d] and v [context, kv heads, dv] of the same sequence: [tokens, heads,
    dv]. A query sees the last `window` keys up to its own (0: all). A sink is one more score, which gives nothing."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:2], v.shape[2]))
    share = q.shape[1] // k.shape[1]
    for t, position in enumerate(positions):
        first = max(0, position - window + 1) if window else 0
        warmth = 1 + temperature * np.log(1 + position // temperature_context)
        for head in range(q.shape[1]):
            scores = k[first : position + 1, head // share] @ q[t, head] * scale * warmth
            if sinks is not None:
                scores = np.append(scores, sinks[head])
            weights = ops.softmax(scores)[: position + 1 - first]
            out[t, head] = weights @ v[first : position + 1, head // share]
    return out


def gate(x, by, kind):
    """x [rows, heads, length] times the activation of `by` [rows, heads, length or 1]."""
    by = np.asarray(by, np.float64)
    return x * {"sigmoid": ops.sigmoid, "softplus": lambda z: np.logaddexp(0, z), "silu": lambda z: z * ops.sigmoid(z)}[kind](by)
