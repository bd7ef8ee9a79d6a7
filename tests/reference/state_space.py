"""State spaces in plain numpy and float64, one token after another, to compare kernels with.

Owns clarity. Must not know how the kernels do it: no runs, tiles, vectors or threads here.
"""

from __future__ import annotations

import numpy as np

from tests.reference.ops import sigmoid


def softplus(v):
    return np.logaddexp(0, np.asarray(v, np.float64))


def mamba2(x, b, c, dt, z, a, d, state):
    """x, z [tokens, heads, p], b, c [tokens, groups, N], dt [tokens, heads], a, d [heads], state [heads, p, N]: the outputs
    and the state behind them."""
    share = x.shape[1] // b.shape[1]
    outputs, state = [], np.array(state, np.float64)
    for t in range(len(x)):
        step = softplus(dt[t])
        y = np.zeros(x.shape[1:])
        for head in range(x.shape[1]):
            taken = np.outer(step[head] * x[t, head], b[t, head // share])
            state[head] = np.exp(step[head] * a[head]) * state[head] + taken
            y[head] = state[head] @ c[t, head // share] + d[head] * x[t, head]
        outputs.append(y * z[t] * sigmoid(z[t]))
    return np.array(outputs), state


def mamba(x, b, c, dt, z, a, d, state):
    """x, z, dt [tokens, channels], b, c [tokens, N], a, state [channels, N], d [channels]."""
    outputs, state = [], np.array(state, np.float64)
    for t in range(len(x)):
        step = softplus(dt[t])
        state = np.exp(step[:, None] * a) * state + (step * x[t])[:, None] * b[t]
        outputs.append((state @ c[t] + d * x[t]) * z[t] * sigmoid(z[t]))
    return np.array(outputs), state


def group_norm(x, weight, eps):
    """x [rows, groups, width], weight [groups, width]."""
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight
