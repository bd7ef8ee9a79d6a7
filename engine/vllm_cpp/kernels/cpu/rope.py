"""Rotary positions, and the way of q, k and v from the projections into attention.

Owns the frequencies of each kind of scaling, the table of cosines and sines of a step, and the operation that norms heads, turns q and k, and stores
k and v in their KV blocks. Must not know architectures: which layout and which scaling a model wants is told.
"""

from __future__ import annotations

import numpy as np

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

# ops: rope_store_f16, rope_store_f32
ROPE_STORE_FIELDS = (
    "count",  # address of the int64 number of tokens
    "q", "q_stride",  # f32[n_tokens, n_heads, head_dim], turned in place; bytes between two tokens
    "k", "k_stride",  # f32[n_tokens, n_kv_heads, head_dim], turned in place, then stored
    "v", "v_stride",  # f32[n_tokens, n_kv_heads, head_dim], stored
    "n_heads", "n_kv_heads", "head_dim",
    "layout", "half",  # NEOX or NEIGHBOURS; half = rot / 2 pairs turn, the rest of a head passes through
    "table", "table_stride",  # of rope_table
    "q_norm", "k_norm", "eps",  # f32[head_dim] weights of a norm a head, before turning, or 0; float
    "k_cache", "v_cache", "block_size",  # the layer's KV buffers (kv_cache.py)
    "positions", "seqs",  # i32[n_tokens]: position of a token, row of its sequence in block_tables
    "block_tables", "block_tables_stride",  # i32[max_num_seqs, max_blocks]: block ids; bytes between two sequences
)  # fmt: skip
(_COUNT, _Q, _Q_STRIDE, _K, _K_STRIDE, _V, _V_STRIDE, _N_HEADS, _N_KV_HEADS, _HEAD_DIM, _LAYOUT, _HALF, _TABLE, _TABLE_STRIDE, _Q_NORM, _K_NORM, _EPS,
 _K_CACHE, _V_CACHE, _BLOCK_SIZE, _POSITIONS, _SEQS, _BLOCK_TABLES, _BLOCK_TABLES_STRIDE) = range(len(ROPE_STORE_FIELDS))  # fmt: skip


def rope_frequencies(
    rot: int,
    base: float,
    *,
    scaling: str = "none",
    factor: float = 1.0,
    original_context: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attn_factor: float = 1.0,
    divisors: np.ndarray | None = None,
) -> tuple[np.ndarray, float]:
    """Angle per position of each pair, f64[rot / 2], and what cosine and sine are multiplied by.

    Pair i turns by `base ** (-2i / rot)` a position, divided by `divisors[i]` where the file has rope factors. "linear" divides every angle by `factor`
    (position interpolation, Chen et al. 2023). "yarn" (Peng et al. 2023, as ggml computes it) divides the slow pairs only: pairs that turn less than
    `beta_slow` times over the original context by `factor`, those that turn more than `beta_fast` times not at all, a ramp between; and multiplies
    cosine and sine by `1 + 0.1 ln(factor)`.
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
    return angles / factor * (1 - kept) + angles * kept, attn_factor * float(1 + 0.1 * np.log(factor))
