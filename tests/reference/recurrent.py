"""Recurrent operations in plain numpy and float64, one token after another, to compare kernels with.

Owns clarity. Must not know how the kernels do it: no runs, tiles, vectors or threads here.
"""

from __future__ import annotations

import numpy as np

from tests.reference.ops import rmsnorm, sigmoid


def silu(x):
    return x * sigmoid(x)


def convolution(x, weight, bias=0.0):
    """x [tokens, channels], weight [channels, taps]: before the first token everything is zero."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), np.asarray(x, np.float64)])
    return np.array([sum(padded[t + k] * weight[:, k] for k in range(taps)) for t in range(len(x))]) + bias


def l2(x, eps):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)


def decays(alpha, rate, shift, bound=0.0):
    """Of the same shape as all three: how much of the state is kept."""
    x = np.asarray(alpha, np.float64) + shift
    return np.exp(bound * sigmoid(rate * x)) if bound else np.exp(rate * np.logaddexp(0, x))


def delta_rule(q, k, v, decay, beta):
    """q, k, v [tokens, heads, d]; decay [tokens, heads, 1 or d]; beta [tokens, heads]; queries are scaled already."""
    state, out = np.zeros((v.shape[1], v.shape[2], v.shape[2])), []  # [head, key channel, value channel]
    for t in range(len(v)):
        state = state * decay[t][:, :, None]
        delta = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * delta[:, None, :]
        out.append(np.einsum("hkv,hk->hv", state, q[t]))
    return np.array(out)


def gated_norm(x, weight, eps, gate, activation):
    """x, gate [tokens, heads, d]."""
    return rmsnorm(x, weight, eps) * activation(np.asarray(gate, np.float64))
