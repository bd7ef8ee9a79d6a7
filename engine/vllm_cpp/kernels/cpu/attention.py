"""Causal attention over the paged KV cache, query heads of a KV head together.

Owns how a step's tokens are cut into tiles, how long contexts are cut into chunks, and the one order of arithmetic: a token's output has the same bits
whatever else the step computes and on however many threads. Must not know models, nor who owns a block.
"""

from __future__ import annotations

PLAN_FIELDS = (
    "count",  # address of the int64 number of tokens
    "positions", "seqs",  # i32[n_tokens]: position of a token, row of its sequence in block_tables
    "tile_tokens",  # tokens of one sequence computed together: tile_tokens(n_heads, n_kv_heads)
    "chunk_tokens",  # keys of a chunk: chunk_tokens(block_size)
    "n_slots",  # partial results there is room for
    "plan",  # out: plan_words(max_tokens, n_slots) i32
    "max_items",  # max_tokens + n_slots
)  # fmt: skip
_P_COUNT, _P_POSITIONS, _P_SEQS, _P_TILE_TOKENS, _P_CHUNK_TOKENS, _P_N_SLOTS, _P_PLAN, _P_MAX_ITEMS = range(len(PLAN_FIELDS))

# ops: attention_f16 or attention_f32, then attention_merge with the same record
ATTENTION_FIELDS = (
    "plan", "max_items",  # written by attention_plan once a step
    "q", "q_stride",  # f32[n_tokens, n_heads, head_dim]; bytes between two tokens
    "out", "out_stride",  # f32[n_tokens, n_heads, head_dim]; bytes between two tokens
    "n_heads", "n_kv_heads", "head_dim",
    "scale",  # float scores are multiplied by
    "k_cache", "v_cache", "block_size",  # the layer's KV buffers (kv_cache.py)
    "block_tables", "block_tables_stride",  # i32[max_num_seqs, max_blocks]: block ids; bytes between two sequences
    "chunk_tokens",
    "partials",  # n_slots * partial_bytes(n_heads, head_dim)
    "scratch", "scratch_stride",  # per thread: scratch_bytes(n_heads, n_kv_heads, head_dim, block_size)
)  # fmt: skip
(_PLAN, _MAX_ITEMS, _Q, _Q_STRIDE, _OUT, _OUT_STRIDE, _N_HEADS, _N_KV_HEADS, _HEAD_DIM, _SCALE, _K_CACHE, _V_CACHE, _BLOCK_SIZE, _BLOCK_TABLES,
 _BLOCK_TABLES_STRIDE, _CHUNK_TOKENS, _PARTIALS, _SCRATCH, _SCRATCH_STRIDE) = range(len(ATTENTION_FIELDS))  # fmt: skip

CHUNK_TOKENS = 256  # keys between two merges: the unit long contexts are shared out by
TILE_ROWS = 64  # (token, query head) rows that share one pass over a KV block
ROW_UNIT = 8  # rows are computed up to this many at a time; tiles are padded to it
_ITEM_WORDS, _MERGE_WORDS, _HEAD_WORDS = 8, 4, 8


def tile_tokens(n_heads: int, n_kv_heads: int) -> int:
    return max(1, TILE_ROWS // (n_heads // n_kv_heads))


def chunk_tokens(block_size: int) -> int:
    return max(1, CHUNK_TOKENS // block_size) * block_size


def plan_words(max_tokens: int, n_slots: int) -> int:
    """i32 words of a plan."""
    return _HEAD_WORDS + _ITEM_WORDS * (max_tokens + n_slots) + _MERGE_WORDS * max_tokens


def partial_bytes(n_heads: int, head_dim: int) -> int:
    """Bytes of one slot: for each head the weighted sum of values, the largest score and the sum of weights."""
    return 4 * n_heads * ((head_dim + 15) // 16 * 16 + 16)


def scratch_bytes(n_heads: int, n_kv_heads: int, head_dim: int, block_size: int) -> int:
    """Bytes a thread needs: per row of a tile the query, the scores of a block, two sums of values and 64 bytes of statistics four times."""
    rows = (tile_tokens(n_heads, n_kv_heads) * (n_heads // n_kv_heads) + ROW_UNIT - 1) // ROW_UNIT * ROW_UNIT
    row = (head_dim + 15) // 16 * 16
    return 4 * rows * (3 * row + block_size + 4 * 16)
