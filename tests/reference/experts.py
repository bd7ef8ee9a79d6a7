"""Feed-forward parts in plain numpy and float64: activations, routing, experts, one obvious line at a time.

Owns clarity. Must not know how the kernels do it: no towers in pieces, no sorted pairs, no vectors.
"""

from __future__ import annotations

import numpy as np

from tests.reference.ops import sigmoid, softmax


def silu(z):
    return z * sigmoid(z)


def gelu(z):
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def gelu_table(z):
    """By way of float16 on both sides, within -10 ... 10."""
    inside = gelu(np.clip(z, -10, 10).astype(np.float16).astype(np.float64)).astype(np.float16).astype(np.float64)
    return np.where(z <= -10, 0, np.where(z >= 10, z, inside))


# name -> f(gate, up, limit)
ACTIVATIONS = {
    "silu": lambda g, u, c: silu(g) * u,
    "gelu": lambda g, u, c: gelu(g) * u,
    "squared relu": lambda g, u, c: np.maximum(u, 0) ** 2,
    "shifted silu": lambda g, u, c: np.minimum(g, c) * sigmoid(1.702 * np.minimum(g, c)) * (np.clip(u, -c, c) + 1),
    "silu, then cut": lambda g, u, c: np.minimum(silu(g), c) * np.clip(u, -c, c),
    "cut, then silu": lambda g, u, c: silu(np.minimum(g, c)) * np.clip(u, -c, c),
    "gelu alone": lambda g, u, c: gelu_table(u),
}


SCORES = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "softmax_chosen": lambda z: z,
    "sqrt_softplus": lambda z: np.sqrt(np.logaddexp(z, 0)),
}


def route(logits, top_k, scores="softmax", bias=None, normalize=False, scale=1.0, groups=1, groups_used=1, listed=None):
    """Router logits [tokens, experts] -> ids and weights [tokens, top_k], by falling score, ties to the lower expert. `listed`: ids that
    are not chosen but given."""
    logits = np.asarray(logits, np.float64)
    p = SCORES[scores](logits)
    s = p if bias is None else p + bias
    if groups > 1:
        grouped = s.reshape(len(s), groups, -1)
        merit = np.sort(grouped, 2)[:, :, -2:].sum(2)
        kept = np.argsort(-merit, 1, kind="stable")[:, :groups_used]
        closed = np.ones(merit.shape, bool)
        np.put_along_axis(closed, kept, False, 1)
        s = np.where(closed[:, :, None], -1e38, grouped).reshape(s.shape)
    ids = np.argsort(-s, axis=1, kind="stable")[:, :top_k] if listed is None else listed
    weights = np.take_along_axis(p, ids, 1)
    if scores == "softmax_chosen":
        weights = softmax(weights)
    if normalize:
        weights = weights / np.maximum(weights.sum(1, keepdims=True), 6.103515625e-5)
    return ids, weights * scale


def experts(x, gate, up, down, ids, weights, activation="silu", limit=np.inf, scales=(None, None, None), biases=(None, None, None)):
    """The weighted sum of the chosen experts' outputs [tokens, width]. Towers [experts, rows, columns]; a scale is one number an expert, a
    bias one row; gate is not looked at where the activation has none."""

    def linear(tower, part, e, v):
        y = tower[e].astype(np.float64) @ v
        y = y if scales[part] is None else y * scales[part][e]
        return y if biases[part] is None else y + biases[part][e]

    out = np.zeros((len(x), down.shape[1]))
    for t, row in enumerate(np.asarray(x, np.float64)):
        for e, weight in zip(ids[t], weights[t], strict=True):
            g = None if gate is None else linear(gate, 0, e, row)
            out[t] += weight * linear(down, 2, e, ACTIVATIONS[activation](g, linear(up, 1, e, row), limit))
    return out
