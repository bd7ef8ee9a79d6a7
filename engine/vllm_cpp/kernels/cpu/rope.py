"""Rotary positions, and the way of q, k and v from the projections into attention.

Owns the frequencies of each kind of scaling, the table of cosines and sines of a step, the operation that norms heads, turns q and k, and
stores k and v in their KV blocks, and one that only norms or turns. Must not know architectures: which layout and which scaling a model
wants is told.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu import kv_cache
from vllm_cpp.kernels.cpu.fields import field, index, number, share
from vllm_cpp.kernels.cpu.kv_cache import GROUP
from vllm_cpp.kernels.cpu.norm import norm_row
from vllm_cpp.kernels.simd import f32, f32x8, f32x16, i8, i32
from vllm_cpp.kernels.vectors import Value, unrolled

LANES = 16

# Which values of a head form a pair (`layout`).
NEOX = 0  # i and i + rot / 2
NEIGHBOURS = 1  # 2i and 2i + 1

ROPE_TABLE_FIELDS = (
    "count",  # address of the int64 number of tokens
    "positions",  # i32[n_tokens]
    "frequencies", "half",  # f64[half]: angle a position; half = rot / 2
    "magnitude",  # float both cosine and sine are multiplied by
    "table", "table_stride",  # out f32: cosines [half], then sines [half]; bytes between two tokens (at least 8 * half)
)  # fmt: skip
_T_COUNT, _T_POSITIONS, _T_FREQUENCIES, _T_HALF, _T_MAGNITUDE, _T_TABLE, _T_TABLE_STRIDE = range(len(ROPE_TABLE_FIELDS))

ROPE_STORE_FIELDS = (
    "count",  # address of the int64 number of tokens
    "q", "q_stride",  # f32[n_tokens, n_heads, head_dim], turned in place; bytes between two tokens
    "q_head_stride",  # bytes between two heads of q
    "k", "k_stride",  # f32[n_tokens, n_kv_heads, head_dim], turned in place, then stored
    "v", "v_stride",  # f32[n_tokens, n_kv_heads, value_length], stored; may lie within k
    "n_heads", "n_kv_heads", "head_dim", "value_length",  # n_heads 0: there is no q
    "layout", "half",  # NEOX or NEIGHBOURS; half = rot / 2 pairs turn, the rest of a head passes through; 0: nothing turns
    "table", "table_stride",  # of rope_table
    "q_norm", "k_norm", "eps",  # f32[head_dim] weights of a norm a head, before turning, or 0; float
    "k_cache", "v_cache", "block_size", "num_blocks",  # the layer's KV buffers (kv_cache.py)
    "kv_format",  # what they hold: a place in kv_cache.FORMATS
    "k_bytes", "v_bytes",  # bytes of a panel there
    "positions", "seqs",  # i32[n_tokens]: position of a token, row of its sequence in block_tables
    "block_tables", "block_tables_stride",  # i32[max_num_seqs, max_blocks]: block ids; bytes between two sequences
)  # fmt: skip
(_COUNT, _Q, _Q_STRIDE, _Q_HEAD_STRIDE, _K, _K_STRIDE, _V, _V_STRIDE, _N_HEADS, _N_KV_HEADS, _HEAD_DIM, _VALUE_LENGTH, _LAYOUT, _HALF,
 _TABLE, _TABLE_STRIDE, _Q_NORM, _K_NORM, _EPS, _K_CACHE, _V_CACHE, _BLOCK_SIZE, _NUM_BLOCKS, _KV_FORMAT, _K_BYTES, _V_BYTES, _POSITIONS,
 _SEQS, _BLOCK_TABLES, _BLOCK_TABLES_STRIDE) = range(len(ROPE_STORE_FIELDS))  # fmt: skip

TURN_HEADS_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "head_stride",  # f32 rows of heads; bytes between two rows, two heads
    "out", "out_stride", "out_head_stride",  # where they go: x itself, or other rows, where they are normed
    "n_heads", "length",  # values of a head
    "normed", "norm", "eps",  # flag: heads are normed first, by f32[length] weights (0: none); float
    "layout", "half", "first",  # pairs that turn, from the `first` value of a head on; half 0: nothing turns
    "backwards",  # flag: by the negative angle
    "table", "table_stride",  # of rope_table
)  # fmt: skip
(_H_COUNT, _H_X, _H_X_STRIDE, _H_HEAD_STRIDE, _H_OUT, _H_OUT_STRIDE, _H_OUT_HEAD_STRIDE, _H_N_HEADS, _H_LENGTH, _H_NORMED, _H_NORM,
 _H_EPS, _H_LAYOUT, _H_HALF, _H_FIRST, _H_BACKWARDS, _H_TABLE, _H_TABLE_STRIDE) = range(len(TURN_HEADS_FIELDS))  # fmt: skip


def rope_frequencies(
    rot: int,
    base: float,
    *,
    scaling: str = "none",
    factor: float = 1.0,
    original_context: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    log_multiplier: float = 0.0,
    attn_factor: float = 1.0,
    divisors: np.ndarray | None = None,
) -> tuple[np.ndarray, float]:
    """Angle per position of each pair, f64[rot / 2], and what cosine and sine are multiplied by.

    Pair i turns by `base ** (-2i / rot)` a position, divided by `divisors[i]` where the file has rope factors. "linear" divides every
    angle by `factor` (position interpolation, Chen et al. 2023). "yarn" (Peng et al. 2023, as ggml computes it) divides the slow pairs
    only: pairs that turn less than `beta_slow` times over the original context by `factor`, those that turn more than `beta_fast` times
    not at all, a ramp between; and multiplies cosine and sine by `1 + 0.1 ln(factor)`, over `1 + 0.1 log_multiplier ln(factor)`.
    """
    pair = np.arange(rot // 2, dtype=np.float64)
    angles = base ** (-2.0 * pair / rot)
    if divisors is not None:
        angles = angles / np.asarray(divisors, np.float64)
    if scaling == "none":
        return angles, attn_factor
    if scaling == "linear":
        return angles / factor, attn_factor
    if scaling != "yarn":
        raise ValueError(f"rope scaling is {scaling!r}, it must be none, linear or yarn")

    def pair_turning(times: float) -> float:
        return rot * np.log(original_context / (times * 2 * np.pi)) / (2 * np.log(base))

    low, high = max(0.0, np.floor(pair_turning(beta_fast))), min(rot - 1.0, np.ceil(pair_turning(beta_slow)))
    kept = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
    magnitude = (1 + 0.1 * np.log(factor)) / (1 + 0.1 * log_multiplier * np.log(factor))
    return angles / factor * (1 - kept) + angles * kept, attn_factor * float(magnitude)


@jit.op
def rope_table(args, tid, nth):  # type: ignore[no-untyped-def]
    """Cosine and sine of every pair's angle at every token's position. In float64 from the position on: no error grows with the context."""
    half, magnitude = field(args, _T_HALF), simd.load(types.float64, args + 8 * _T_MAGNITUDE)
    for t in range(tid, field(field(args, _T_COUNT), 0), nth):
        position = simd.convert(types.float64, index(field(args, _T_POSITIONS), t))
        to = field(args, _T_TABLE) + t * field(args, _T_TABLE_STRIDE)
        for i in range(half):
            angle = position * simd.load(types.float64, field(args, _T_FREQUENCIES) + 8 * i)
            simd.store(to + 4 * i, simd.convert(f32, math.cos(angle) * magnitude))
            simd.store(to + 4 * (half + i), simd.convert(f32, math.sin(angle) * magnitude))


@unrolled
def _turned_neighbours(x: Value, cos: Value, sin: Value) -> Value:
    """8 pairs, side by side: (a, b) -> (a cos - b sin, b cos + a sin)."""
    twice = [lane // 2 for lane in range(LANES)]
    cosines, sines = simd.shuffle(cos, twice), simd.shuffle(-sin, [lane // 2 + 8 * (lane % 2) for lane in range(LANES)], sin)
    return x * cosines + simd.shuffle(x, [lane ^ 1 for lane in range(LANES)]) * sines


@jit.inner
def _turn(x, table, half, layout, sense):  # type: ignore[no-untyped-def]
    """Turn one head's first 2 * half values in place; `sense` is 1, or -1: backwards."""
    whole = half & -LANES if layout == NEOX else half & -8
    step = 2 if layout == NEIGHBOURS else 1
    other = 1 if layout == NEIGHBOURS else half
    if layout == NEOX:
        for i in range(0, whole, LANES):
            a, b = simd.load(f32x16, x + 4 * i), simd.load(f32x16, x + 4 * (half + i))
            cos, sin = simd.load(f32x16, table + 4 * i), simd.load(f32x16, table + 4 * (half + i)) * sense
            simd.store(x + 4 * i, a * cos - b * sin)
            simd.store(x + 4 * (half + i), b * cos + a * sin)
    else:
        for i in range(0, whole, 8):
            pairs = simd.load(f32x16, x + 8 * i)
            cos, sin = simd.load(f32x8, table + 4 * i), simd.load(f32x8, table + 4 * (half + i)) * sense
            simd.store(x + 8 * i, _turned_neighbours(pairs, cos, sin))
    for i in range(whole, half):
        a, b = simd.load(f32, x + 4 * i * step), simd.load(f32, x + 4 * (i * step + other))
        cos, sin = simd.load(f32, table + 4 * i), simd.load(f32, table + 4 * (half + i)) * sense
        simd.store(x + 4 * i * step, a * cos - b * sin)
        simd.store(x + 4 * (i * step + other), b * cos + a * sin)


@jit.inner
def _store_floats(x, n, to, step, item_bytes):  # type: ignore[no-untyped-def]
    """n f32 values to the cache, as f16 or f32, `step` bytes apart there."""
    if item_bytes == 4:
        for i in range(n):
            simd.store(to + step * i, simd.load(f32, x + 4 * i))
        return
    whole = n & -LANES if step == 2 else 0
    for i in range(0, whole, LANES):
        simd.store_half(to + 2 * i, simd.load(f32x16, x + 4 * i))
    for i in range(whole, n):
        simd.store_half(to + step * i, simd.load(f32, x + 4 * i))


@jit.inner
def _store_bytes(x, n, to, step, scales, scale_step):  # type: ignore[no-untyped-def]
    """n f32 values to the cache as q8_0, `step` bytes apart there; a scale for each 32, `scale_step` bytes apart. Rounded as ggml does."""
    for first in range(0, n, GROUP):
        last = min(n, first + GROUP)
        largest = f32(0)
        for i in range(first, last):
            largest = simd.maximum(simd.absolute(simd.load(f32, x + 4 * i)), largest)
        factor = f32(127) / largest if largest > 0 else f32(0)
        for i in range(first, last):
            simd.store(to + step * i, simd.convert(i8, simd.convert(i32, simd.nearest(simd.load(f32, x + 4 * i) * factor))))
        simd.store_half(scales + first // GROUP * scale_step, largest / f32(127))


@jit.op
def rope_store(args, tid, nth):  # type: ignore[no-untyped-def]
    """Norm heads (where weights are given), turn q and k in place, store k and v in their block. Shared out by (token, KV head). Without
    heads of q and pairs to turn it only stores."""
    n_kv_heads, head_dim, half, layout = field(args, _N_KV_HEADS), field(args, _HEAD_DIM), field(args, _HALF), field(args, _LAYOUT)
    block_size, kv_format, eps = field(args, _BLOCK_SIZE), field(args, _KV_FORMAT), number(args, _EPS)
    k_bytes, v_bytes = field(args, _K_BYTES), field(args, _V_BYTES)
    q_norm, k_norm = field(args, _Q_NORM), field(args, _K_NORM)
    value_length, q_head_stride = field(args, _VALUE_LENGTH), field(args, _Q_HEAD_STRIDE)
    group, value_row = field(args, _N_HEADS) // n_kv_heads, (value_length + LANES - 1) & -LANES
    groups = (value_length + GROUP - 1) // GROUP
    item_bytes = 4 if kv_format == kv_cache.F32 else 2
    units = field(field(args, _COUNT), 0) * n_kv_heads
    for unit in range(share(units, 1, tid, nth), share(units, 1, tid + 1, nth)):
        t, kv_head = unit // n_kv_heads, unit % n_kv_heads
        table = field(args, _TABLE) + t * field(args, _TABLE_STRIDE)
        q = field(args, _Q) + t * field(args, _Q_STRIDE) + q_head_stride * group * kv_head
        k = field(args, _K) + t * field(args, _K_STRIDE) + 4 * head_dim * kv_head
        v = field(args, _V) + t * field(args, _V_STRIDE) + 4 * value_length * kv_head
        for head in range(group + 1):  # the query heads, then their key head
            x = q + q_head_stride * head if head < group else k
            weight = q_norm if head < group else k_norm
            if weight != 0:
                norm_row(x, head_dim, weight, eps, x)
            _turn(x, table, half, layout, f32(1))
        position = index(field(args, _POSITIONS), t)
        blocks = field(args, _BLOCK_TABLES) + index(field(args, _SEQS), t) * field(args, _BLOCK_TABLES_STRIDE)
        place, slot = kv_head * field(args, _NUM_BLOCKS) + index(blocks, position // block_size), position % block_size
        keys, values = field(args, _K_CACHE) + place * k_bytes, field(args, _V_CACHE) + place * v_bytes
        if kv_format == kv_cache.Q8_0:
            scales = keys + block_size * head_dim + 2 * slot
            _store_bytes(k, head_dim, keys + slot, block_size, scales, 2 * block_size)
            scales = values + block_size * value_row + 2 * groups * slot
            _store_bytes(v, value_length, values + slot * value_row, 1, scales, 2)
        else:
            _store_floats(k, head_dim, keys + item_bytes * slot, item_bytes * block_size, item_bytes)
            _store_floats(v, value_length, values + item_bytes * slot * value_row, item_bytes, item_bytes)


@jit.op
def turn_heads(args, tid, nth):  # type: ignore[no-untyped-def]
    """Norm heads where that is asked for, then turn them. Shared out by (row, head)."""
    n_heads, length, half, layout = field(args, _H_N_HEADS), field(args, _H_LENGTH), field(args, _H_HALF), field(args, _H_LAYOUT)
    sense = f32(-1) if field(args, _H_BACKWARDS) != 0 else f32(1)
    units = field(field(args, _H_COUNT), 0) * n_heads
    for unit in range(share(units, 1, tid, nth), share(units, 1, tid + 1, nth)):
        t, head = unit // n_heads, unit % n_heads
        x = field(args, _H_X) + t * field(args, _H_X_STRIDE) + head * field(args, _H_HEAD_STRIDE)
        out = field(args, _H_OUT) + t * field(args, _H_OUT_STRIDE) + head * field(args, _H_OUT_HEAD_STRIDE)
        if field(args, _H_NORMED) != 0:
            norm_row(x, length, field(args, _H_NORM), number(args, _H_EPS), out)
        _turn(out + 4 * field(args, _H_FIRST), field(args, _H_TABLE) + t * field(args, _H_TABLE_STRIDE), half, layout, sense)
