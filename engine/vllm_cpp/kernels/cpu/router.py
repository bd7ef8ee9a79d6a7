"""From router logits to chosen experts and their weights, and the pairs sorted by expert.

Owns the choice (ties go to the lower expert) and the weights. Must not know towers: `moe.py` computes with what is chosen here.
"""

from __future__ import annotations

import math

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.elementwise import sigmoid
from vllm_cpp.kernels.cpu.fields import field, index, number, set_index
from vllm_cpp.kernels.simd import f32, f32x16

LANES = 16
_LOWEST = -3.0e38  # no score is below
_TAKEN = -math.inf  # never equal to a largest score: chosen already, or padding
_LEAST_SUM = 6.103515625e-5  # what llama.cpp divides by at least: the smallest normal f16

# How logits become probabilities (`scores`).
SOFTMAX = 0  # softmax over all experts
SIGMOID = 1
SOFTMAX_CHOSEN = 2  # chosen by the logits themselves, softmax over the chosen ones only
SQRT_SOFTPLUS = 3

ROUTER_FIELDS = (
    "count",  # address of the int64 number of tokens
    "logits", "logits_stride",  # f32[n_tokens, n_experts]; bytes between two rows
    "n_experts", "top_k",
    "scores",  # one of the above
    "bias",  # f32[n_experts] added for the choice only, or 0
    "groups", "groups_used",  # equal runs of experts, of which only so many are chosen from; groups 1: no groups
    "table",  # 0, or i32[vocabulary, top_k]: what is chosen by the token alone
    "tokens", "sampled",  # i32 token ids; i32 which of them each row of logits is of, or 0: row by row
    "normalize",  # 1: weights are divided by max(their sum, 6.1035e-5)
    "scale",  # float the weights are multiplied by (1.0: none)
    "ids",  # out i32[n_tokens, top_k], by falling score
    "weights",  # out f32[n_tokens, top_k]
    "scratch", "scratch_stride",  # per thread: scratch_bytes(n_experts)
)  # fmt: skip
(_COUNT, _LOGITS, _LOGITS_STRIDE, _N_EXPERTS, _TOP_K, _SCORES, _BIAS, _GROUPS, _GROUPS_USED, _TABLE, _TOKENS, _SAMPLED, _NORMALIZE,
 _SCALE, _IDS, _WEIGHTS, _SCRATCH, _SCRATCH_STRIDE) = range(len(ROUTER_FIELDS))  # fmt: skip

GROUP_FIELDS = (
    "count",  # address of the int64 number of pairs (tokens * top_k)
    "ids",  # i32[n_pairs]
    "n_experts",
    "offsets",  # out i32[n_experts + 1]
    "pairs",  # out i32[n_pairs]: pair numbers (token * top_k + slot) by expert, then by number
)
_G_COUNT, _G_IDS, _G_N_EXPERTS, _G_OFFSETS, _G_PAIRS = range(len(GROUP_FIELDS))


def scratch_bytes(n_experts: int) -> int:
    """Bytes a thread needs: three f32 rows of n_experts (or, what is less, as many as groups), padded to whole vectors."""
    return 3 * 4 * ((n_experts + LANES - 1) & -LANES)


@jit.inner
def _probabilities(logits, n, padded, kind, p):  # type: ignore[no-untyped-def]
    """p = what the kind of scores makes of the logits; `padded` values are written, those beyond n mean nothing."""
    for i in range(n):
        simd.store(p + 4 * i, simd.load(f32, logits + 4 * i))
    for i in range(n, padded):
        simd.store(p + 4 * i, f32(_LOWEST))
    if kind == SIGMOID:
        for i in range(0, padded, LANES):
            simd.store(p + 4 * i, sigmoid(simd.load(f32x16, p + 4 * i)))
    elif kind == SQRT_SOFTPLUS:
        for i in range(0, padded, LANES):
            simd.store(p + 4 * i, simd.sqrt(simd.softplus(simd.load(f32x16, p + 4 * i))))
    elif kind == SOFTMAX:
        lanes = simd.splat(f32x16, f32(_LOWEST))
        for i in range(0, padded, LANES):
            lanes = simd.maximum(simd.load(f32x16, p + 4 * i), lanes)
        largest, total = simd.hmax(lanes), simd.zero(f32x16)
        for i in range(0, padded, LANES):
            e = simd.exp(simd.load(f32x16, p + 4 * i) - largest)
            simd.store(p + 4 * i, e)
            total = total + e
        factor = f32(1) / simd.hsum(total)
        for i in range(0, padded, LANES):
            simd.store(p + 4 * i, simd.load(f32x16, p + 4 * i) * factor)


@jit.inner
def _best(s, padded, otherwise):  # type: ignore[no-untyped-def]
    """The lowest index of the largest score; `otherwise` if there is none (all are not numbers)."""
    lanes = simd.splat(f32x16, f32(_LOWEST))
    for i in range(0, padded, LANES):
        lanes = simd.maximum(simd.load(f32x16, s + 4 * i), lanes)
    largest = simd.hmax(lanes)
    for i in range(0, padded, LANES):
        lane = simd.first_lane(simd.load(f32x16, s + 4 * i) == largest)
        if lane < LANES:
            return i + lane
    return otherwise


@jit.inner
def _close_groups(s, n, groups, used, g):  # type: ignore[no-untyped-def]
    """Put the scores of all but the `used` best groups below every other. A group is as good as its two largest scores together; ties go
    to the lower group. `g` is room for a score each."""
    size, padded = n // groups, (groups + LANES - 1) & -LANES
    for group in range(groups):
        first, second = f32(_TAKEN), f32(_TAKEN)
        for i in range(group * size, (group + 1) * size):
            score = simd.load(f32, s + 4 * i)
            if score > first:
                first, second = score, first
            elif score > second:
                second = score
        simd.store(g + 4 * group, first + second if size > 1 else first)
    for group in range(groups, padded):
        simd.store(g + 4 * group, f32(_TAKEN))
    for j in range(used):
        simd.store(g + 4 * _best(g, padded, j), f32(_TAKEN))
    for group in range(groups):
        if simd.load(f32, g + 4 * group) != f32(_TAKEN):
            for i in range(group * size, (group + 1) * size):
                simd.store(s + 4 * i, f32(_LOWEST))


@jit.op
def route(args, tid, nth):  # type: ignore[no-untyped-def]
    """Each token's chosen experts, by falling score, and their weights. Tokens are shared out over threads."""
    n_experts, top_k, kind, bias = field(args, _N_EXPERTS), field(args, _TOP_K), field(args, _SCORES), field(args, _BIAS)
    padded = (n_experts + LANES - 1) & -LANES
    p = field(args, _SCRATCH) + tid * field(args, _SCRATCH_STRIDE)
    s = p + 4 * padded
    for t in range(tid, field(field(args, _COUNT), 0), nth):
        _probabilities(field(args, _LOGITS) + t * field(args, _LOGITS_STRIDE), n_experts, padded, kind, p)
        for i in range(n_experts):
            steering = simd.load(f32, bias + 4 * i) if bias != 0 else f32(0)
            simd.store(s + 4 * i, simd.load(f32, p + 4 * i) + steering)
        for i in range(n_experts, padded):
            simd.store(s + 4 * i, f32(_TAKEN))
        if field(args, _GROUPS) > 1:
            _close_groups(s, n_experts, field(args, _GROUPS), field(args, _GROUPS_USED), s + 4 * padded)
        row = index(field(args, _SAMPLED), t) if field(args, _SAMPLED) != 0 else t
        listed = field(args, _TABLE)
        if listed != 0:
            listed += 4 * top_k * index(field(args, _TOKENS), row)
        ids, weights = field(args, _IDS) + 4 * t * top_k, field(args, _WEIGHTS) + 4 * t * top_k
        for j in range(top_k):
            expert = index(listed, j) if listed != 0 else _best(s, padded, j)
            set_index(ids, j, expert)
            simd.store(weights + 4 * j, simd.load(f32, p + 4 * expert))
            simd.store(s + 4 * expert, f32(_TAKEN))
        total = f32(0)
        largest = simd.load(f32, weights)
        for j in range(top_k):
            weight = simd.load(f32, weights + 4 * j)
            if kind == SOFTMAX_CHOSEN:
                weight = simd.exp(weight - largest)
                simd.store(weights + 4 * j, weight)
            total = total + weight
        if field(args, _NORMALIZE) != 0:
            total = simd.maximum(total, f32(_LEAST_SUM))
        divisor = total if kind == SOFTMAX_CHOSEN or field(args, _NORMALIZE) != 0 else f32(1)
        for j in range(top_k):
            simd.store(weights + 4 * j, simd.load(f32, weights + 4 * j) / divisor * number(args, _SCALE))


@jit.op
def group_by_expert(args, tid, nth):  # type: ignore[no-untyped-def]  # noqa: ARG001 - every op takes both
    """Counting sort of the pairs by expert, stable; thread 0 does it."""
    if tid != 0:
        return
    n, ids, n_experts = field(field(args, _G_COUNT), 0), field(args, _G_IDS), field(args, _G_N_EXPERTS)
    offsets, pairs = field(args, _G_OFFSETS), field(args, _G_PAIRS)
    for e in range(n_experts + 1):
        set_index(offsets, e, 0)
    for i in range(n):
        e = index(ids, i)
        set_index(offsets, e + 1, index(offsets, e + 1) + 1)
    for e in range(n_experts):
        set_index(offsets, e + 1, index(offsets, e + 1) + index(offsets, e))
    for i in range(n):
        e = index(ids, i)
        set_index(pairs, index(offsets, e), i)
        set_index(offsets, e, index(offsets, e) + 1)
    for e in range(n_experts, 0, -1):  # each start has moved to the next expert's
        set_index(offsets, e, index(offsets, e - 1))
    set_index(offsets, 0, 0)
