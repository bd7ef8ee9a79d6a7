"""One token from one row of logits.

Owns: argmax, temperature, min-p, top-k, top-p and the draw, as pure functions over arrays. Must not know parameters, requests or random
number generators: the uniform number comes from the caller.

Logits are f32 of one vocabulary. Weights are unnormalised probabilities. The filters work on what the filter before left, in the order
min-p, top-k, top-p, and return ascending positions, so that a draw depends on nothing but values. Only top-p sorts, and only what is not
negligible.
"""

from __future__ import annotations

import math

import numpy as np

from vllm_cpp.errors import GenerationError

_BLOCK = 512


def greatest(logits: np.ndarray) -> int:
    """The id of the greatest logit, the lowest of equals."""
    token = int(logits.argmax())  # argmax finds a NaN first, if there is one
    value = logits[token]
    if not value > -np.inf:
        raise _nothing_to_choose(value)
    return token


def draw(logits: np.ndarray, uniform: float, *, temperature: float, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> int:
    """A token with probability softmax(logits / temperature) after the filters; `uniform` in [0, 1) decides which.

    `logits` is worked on in place: fresh memory of a vocabulary's size costs more than the arithmetic.
    """
    top = logits.max()
    if not top > -np.inf:
        raise _nothing_to_choose(top)
    if top == np.inf:  # a logits processor's way to force tokens: they share all of the probability
        forced = np.flatnonzero(logits == top)
        return int(forced[int(uniform * forced.size)])
    scaled = np.subtract(logits, top, out=logits)  # the greatest is 0, so nothing overflows however low the temperature
    scaled /= np.float32(temperature)
    ids = None
    if min_p > 0.0:
        ids = keep_min_p(scaled, min_p)
        scaled = scaled[ids]
    if 0 < top_k < scaled.size:
        kept = keep_top_k(scaled, top_k)
        ids, scaled = kept if ids is None else ids[kept], scaled[kept]
    weights = np.exp(scaled, out=scaled)
    if top_p < 1.0:
        kept = keep_top_p(weights, top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return _pick(ids, weights, uniform)


def keep_min_p(scaled: np.ndarray, min_p: float) -> np.ndarray:
    """Positions whose probability is at least `min_p` of the greatest one's; `scaled` has its greatest value at 0."""
    return np.flatnonzero(scaled >= math.log(min_p))


def keep_top_k(scaled: np.ndarray, top_k: int) -> np.ndarray:
    """Positions of the `top_k` greatest; all of those equal to the last of them stay, as in vLLM."""
    cut = np.partition(scaled, scaled.size - top_k)[scaled.size - top_k]
    return np.flatnonzero(scaled >= cut)


def keep_top_p(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Positions of the fewest greatest weights that hold `top_p` of the sum, never none; of equals the lowest positions stay."""
    total = weights.sum(dtype=np.float64)
    # However many weights are below the mean of what may be left out, together they are less than that: only the others need sorting.
    able = np.flatnonzero(weights >= (1.0 - top_p) * total / weights.size)
    weights = weights[able]
    greatest_first = np.sort(weights)[::-1]
    count = min(int(np.searchsorted(greatest_first.cumsum(dtype=np.float64), top_p * total)) + 1, weights.size)
    cut = greatest_first[count - 1]
    above = np.flatnonzero(weights > cut)
    equal = np.flatnonzero(weights == cut)[: count - above.size]
    return able[np.sort(np.concatenate((above, equal)))]


def _pick(ids: np.ndarray | None, weights: np.ndarray, uniform: float) -> int:
    """The position at which the running sum of weights passes `uniform` of the whole.

    A running sum over a vocabulary is slow, as each addition waits for the one before: so sums of blocks find the block, and a running sum
    the place in it.
    """
    whole = weights.size - weights.size % _BLOCK
    sums = np.append(weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64), weights[whole:].sum(dtype=np.float64)).cumsum()
    wanted = uniform * sums[-1]
    block = _passing(sums, wanted)
    begin = block * _BLOCK
    before = sums[block - 1] if block else 0.0
    position = begin + _passing(weights[begin : begin + _BLOCK].cumsum(dtype=np.float64), wanted - before)
    return position if ids is None else int(ids[position])


def _passing(sums: np.ndarray, wanted: float) -> int:
    """Where a running sum first exceeds `wanted`. Rounding may leave no such place: then the last that has weight."""
    return min(int(np.searchsorted(sums, wanted, side="right")), int(np.searchsorted(sums, sums[-1])))


def _nothing_to_choose(value: float) -> GenerationError:
    what = "NaN" if np.isnan(value) else "-inf for every token"
    return GenerationError(f"no token can be chosen: the logits hold {what}; the model or the logits processor made them")
