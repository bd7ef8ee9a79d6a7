"""Causal attention over the paged KV cache, query heads of a KV head together.

Owns how a step's tokens are cut into tiles, how long contexts are cut into chunks, and the one order of arithmetic: a token's output has
the same bits whatever else the step computes and on however many threads. Must not know models, nor who owns a block.

For each (token, query head) and each chunk of `chunk_tokens` keys, KV block by KV block: scores, running maximum, weights, weighted sum
of values. The chunks' results are folded in order. `attention_plan` decides once a step who computes what: a tile of tokens walks through
all its chunks and folds them itself, or (few tokens, long context) its chunks are shared out and `attention_merge` folds them. Both do
the same arithmetic in the same order. Of a sliding window, chunks and spans of blocks wholly before it are left out: folding a chunk that
nothing is seen of changes no bit.
"""

from __future__ import annotations

import math

from numba import types

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.fields import field, index, set_index
from vllm_cpp.kernels.cpu.panel import call_product, padded_rows
from vllm_cpp.kernels.simd import f32, f32x16, i32x16
from vllm_cpp.kernels.vectors import Value, constant, unrolled

PLAN_FIELDS = (
    "count",  # address of the int64 number of tokens
    "positions", "seqs",  # i32[n_tokens]: position of a token, row of its sequence in block_tables
    "tile_tokens",  # tokens of one sequence computed together: tile_tokens(n_heads, n_kv_heads)
    "chunk_tokens",  # keys of a chunk: chunk_tokens(block_size, head_dim)
    "window",  # a token sees the last so many keys, its own among them; 0: all
    "n_slots",  # partial results there is room for
    "plan",  # out: plan_words(max_tokens, n_slots) i32
    "max_items",  # max_tokens + n_slots
)  # fmt: skip
(_P_COUNT, _P_POSITIONS, _P_SEQS, _P_TILE_TOKENS, _P_CHUNK_TOKENS, _P_WINDOW, _P_N_SLOTS, _P_PLAN, _P_MAX_ITEMS) = range(len(PLAN_FIELDS))

# ops: attention, then attention_merge with the same record
ATTENTION_FIELDS = (
    "plan", "max_items",  # written by attention_plan once a step
    "q", "q_stride", "q_head_stride",  # f32[n_tokens, n_heads, head_dim]; bytes between two tokens, two heads
    "out", "out_stride",  # f32[n_tokens, n_heads, value_length]; bytes between two tokens
    "n_heads", "n_kv_heads", "head_dim", "value_length",
    "scale",  # float scores are multiplied by
    "temperature", "temperature_context",  # float t, count c: scores of position p times 1 + t ln(1 + p // c) too; t 0: not
    "window",  # as the plan has it
    "sinks",  # f32[n_heads]: a score of each head that takes weight and gives no value, or 0
    "k_cache", "v_cache", "block_size", "num_blocks",  # the layer's KV buffers (kv_cache.py)
    "k_bytes", "k_stride", "v_bytes", "v_stride",  # bytes of a panel there, and from one of its rows to the next
    "k_product_fn", "v_product_fn",  # addresses of panel.PRODUCTS
    "block_tables", "block_tables_stride",  # i32[max_num_seqs, max_blocks]: block ids; bytes between two sequences
    "chunk_tokens",
    "partials",  # n_slots * partial_bytes(n_heads, value_length)
    "scratch", "scratch_stride",  # per thread: scratch_bytes(n_heads, n_kv_heads, head_dim, value_length, block_size)
)  # fmt: skip
(_PLAN, _MAX_ITEMS, _Q, _Q_STRIDE, _Q_HEAD_STRIDE, _OUT, _OUT_STRIDE, _N_HEADS, _N_KV_HEADS, _HEAD_DIM, _VALUE_LENGTH, _SCALE,
 _TEMPERATURE, _TEMPERATURE_CONTEXT, _WINDOW, _SINKS, _K_CACHE, _V_CACHE, _BLOCK_SIZE, _NUM_BLOCKS, _K_BYTES, _K_STRIDE, _V_BYTES,
 _V_STRIDE, _K_PRODUCT_FN, _V_PRODUCT_FN, _BLOCK_TABLES, _BLOCK_TABLES_STRIDE, _CHUNK_TOKENS, _PARTIALS, _SCRATCH,
 _SCRATCH_STRIDE) = range(len(ATTENTION_FIELDS))  # fmt: skip

CHUNK_TOKENS = 256  # keys between two merges: the unit long contexts are shared out by
WIDE_HEAD, WIDE_CHUNK_TOKENS = 256, 64  # heads longer than this have so few keys a chunk: such models have few KV heads to share out
SPAN_VALUES = (
    4096  # numbers in the keys between two updates of the running maximum: they, their values and the next keys fit the first cache
)
TILE_ROWS = 64  # (token, query head) rows that share one pass over a KV block
PIECE_HEADS = 4  # where units are fewer than threads, query heads of a KV head are shared out too, so many at least
SPLIT_TOKENS = 8  # tiles of at most so many tokens have their chunks shared out
LANES = 16
_LOWEST = -1e30  # below any score: what a row without keys starts from
_HEAD_WORDS, _ITEM_WORDS, _MERGE_WORDS = 8, 9, 4

# Words of a plan: counts, then the items, then the merges.
_N_ITEMS, _N_MERGES, _TOTAL = 0, 1, 2  # TOTAL: products of all items, one for each token and key
_FIRST, _TOKENS, _SEQ, _POSITION, _CHUNK, _CHUNK_STOP, _SLOT, _SLOT_STRIDE, _BEFORE = range(_ITEM_WORDS)
# SLOT -1: folded on the spot. BEFORE: products of the items before this one.
_M_TOKEN, _M_SLOT, _M_CHUNKS = range(3)


def tile_tokens(n_heads: int, n_kv_heads: int) -> int:
    return max(1, TILE_ROWS // (n_heads // n_kv_heads))


def chunk_tokens(block_size: int, head_dim: int) -> int:
    return max(1, (CHUNK_TOKENS if head_dim <= WIDE_HEAD else WIDE_CHUNK_TOKENS) // block_size) * block_size


def plan_words(max_tokens: int, n_slots: int) -> int:
    """i32 words of a plan."""
    return _HEAD_WORDS + _ITEM_WORDS * (max_tokens + n_slots) + _MERGE_WORDS * max_tokens


def partial_bytes(n_heads: int, value_length: int) -> int:
    """Bytes of one slot: for each head the weighted sum of values, then largest score and sum of weights, a whole vector wide."""
    return n_heads * 4 * (_whole(value_length) + LANES)


def scratch_bytes(n_heads: int, n_kv_heads: int, head_dim: int, value_length: int, block_size: int) -> int:
    """Bytes a thread needs: for each row of a tile the query, the scores of a span, two sums of values, weights lane by lane and five
    numbers."""
    rows = _whole(tile_tokens(n_heads, n_kv_heads) * min(n_heads // n_kv_heads, TILE_ROWS))
    span = min(max(block_size, SPAN_VALUES // head_dim), chunk_tokens(block_size, head_dim))
    return 4 * rows * (_whole(head_dim) + 2 * _whole(value_length) + span + LANES + 5)


@jit.op
def attention_plan(args, tid, nth):  # type: ignore[no-untyped-def]  # noqa: ARG001 - every op takes both
    """Cut this step's tokens into tiles (runs of one sequence) and list what is to be computed. Thread 0 does it, once a step."""
    if tid != 0:
        return
    n, positions, seqs = field(field(args, _P_COUNT), 0), field(args, _P_POSITIONS), field(args, _P_SEQS)
    most, chunk_size, n_slots = field(args, _P_TILE_TOKENS), field(args, _P_CHUNK_TOKENS), field(args, _P_N_SLOTS)
    plan, window = field(args, _P_PLAN), field(args, _P_WINDOW)
    item = plan + 4 * _HEAD_WORDS
    merge = item + 4 * _ITEM_WORDS * field(args, _P_MAX_ITEMS)
    n_items, n_merges, slots, first, products = 0, 0, 0, 0, 0
    while first < n:
        seq, position = index(seqs, first), index(positions, first)
        tokens = 1
        while (
            tokens < most and first + tokens < n
            and index(seqs, first + tokens) == seq and index(positions, first + tokens) == position + tokens
        ):  # fmt: skip
            tokens += 1
        seen = max(0, position - window + 1) if window > 0 else 0  # the first key of all these tokens
        before = seen // chunk_size
        chunks = (position + tokens - 1) // chunk_size + 1 - before
        split = chunks > 1 and tokens <= SPLIT_TOKENS and slots + tokens * chunks <= n_slots
        for part in range(chunks if split else 1):
            set_index(item, _FIRST, first)
            set_index(item, _TOKENS, tokens)
            set_index(item, _SEQ, seq)
            set_index(item, _POSITION, position)
            set_index(item, _CHUNK, before + part)
            set_index(item, _CHUNK_STOP, before + (part + 1 if split else chunks))
            set_index(item, _SLOT, slots + part if split else -1)
            set_index(item, _SLOT_STRIDE, chunks)
            set_index(item, _BEFORE, products)
            begin = (before + part) * chunk_size
            products += tokens * ((min(begin + chunk_size, position + tokens) if split else position + tokens) - max(begin, seen))
            item += 4 * _ITEM_WORDS
            n_items += 1
        if split:
            for t in range(tokens):
                set_index(merge, _M_TOKEN, first + t)
                set_index(merge, _M_SLOT, slots + t * chunks)
                set_index(merge, _M_CHUNKS, (position + t) // chunk_size + 1 - before)
                merge += 4 * _MERGE_WORDS
                n_merges += 1
            slots += tokens * chunks
        first += tokens
    set_index(plan, _N_ITEMS, n_items)
    set_index(plan, _N_MERGES, n_merges)
    set_index(plan, _TOTAL, products)


@unrolled
def _whole(n: Value) -> Value:
    """n rounded up to whole vectors."""
    return (n + (LANES - 1)) & -LANES


@unrolled
def _where(hidden: Value, visible: Value, x: Value, y: float) -> Value:
    """16 values: x for keys from number `hidden` on and before number `visible`, y for the others."""
    lanes, other = constant(i32x16, range(LANES)), constant(f32x16, y)
    return simd.select(lanes < visible, simd.select(lanes < hidden, other, x), other)


@unrolled
def _shown(scores: Value, hidden: Value, visible: Value) -> Value:
    """16 scores, the lowest number where the key is not visible."""
    return _where(hidden, visible, simd.load(f32x16, scores), _LOWEST)


@unrolled
def _weights(scores: Value, hidden: Value, visible: Value, largest: Value) -> Value:
    """16 scores made weights exp(score - largest), 0 where the key is not visible; stored, and returned."""
    weights = _where(hidden, visible, simd.exp(simd.load(f32x16, scores) - largest), 0.0)
    simd.store(scores, weights)
    return weights


@jit.inner
def _clear(address, n_values):  # type: ignore[no-untyped-def]
    """n_values (a multiple of 16) f32 zeros."""
    for i in range(0, n_values, LANES):
        simd.store(address + 4 * i, simd.zero(f32x16))


@jit.inner
def _scaled(x, factor, out, n):  # type: ignore[no-untyped-def]
    """out = x * factor, n values."""
    whole = n & -LANES
    for i in range(0, whole, LANES):
        simd.store(out + 4 * i, simd.load(f32x16, x + 4 * i) * factor)
    for i in range(whole, n):
        simd.store(out + 4 * i, simd.load(f32, x + 4 * i) * factor)


@jit.inner
def _weigh(scores, score_row, columns, n_rows, group, visible, window, largest, factors, lane_weights):  # type: ignore[no-untyped-def]
    """A span's scores become weights against the largest score so far, which is brought up to date; `factors` is what corrects earlier
    weights. The first token sees the span's keys before number `visible`, the next one more, and of those the last `window` (0: all); a
    token has `group` rows."""
    hidden = visible - window if window > 0 else -(1 << 30)
    for r in range(n_rows):
        before = simd.load(f32, largest + 4 * r)
        lanes = simd.splat(f32x16, before)
        for i in range(0, columns, LANES):
            token = r // group - i
            lanes = simd.maximum(_shown(scores + r * score_row + 4 * i, hidden + token, visible + token), lanes)
        now = simd.hmax(lanes)
        simd.store(largest + 4 * r, now)
        simd.store(factors + 4 * r, before - now)
    for r in range(0, n_rows, LANES):
        simd.store(factors + 4 * r, simd.exp(simd.load(f32x16, factors + 4 * r)))
    for r in range(n_rows):
        now = simd.load(f32, largest + 4 * r)
        weights = simd.load(f32x16, lane_weights + 4 * LANES * r) * simd.load(f32, factors + 4 * r)
        for i in range(0, columns, LANES):
            token = r // group - i
            weights = weights + _weights(scores + r * score_row + 4 * i, hidden + token, visible + token, now)
        simd.store(lane_weights + 4 * LANES * r, weights)


@jit.inner
def _fold(sums, largest, weight, total, stats, row):  # type: ignore[no-untyped-def]
    """Add a chunk's result to what the chunks before it gave: `total` f32[row] and, at `stats`, its largest score and sum of weights."""
    before = simd.load(f32, stats)
    together = simd.maximum(before, largest)
    keep, take = simd.exp(before - together), simd.exp(largest - together)
    for i in range(0, row, LANES):
        kept = simd.load(f32x16, total + 4 * i) * keep
        simd.store(total + 4 * i, simd.fma(simd.load(f32x16, sums + 4 * i), take, kept))
    simd.store(stats, together)
    simd.store(stats + 4, simd.load(f32, stats + 4) * keep + weight * take)


@jit.inner
def _start_total(total, stats, row, sinks, head):  # type: ignore[no-untyped-def]
    """Nothing seen yet; or the head's sink, whose weight against itself is 1 and whose value is zero."""
    _clear(total, row)
    simd.store(stats, simd.load(f32, sinks + 4 * head) if sinks != 0 else f32(_LOWEST))
    simd.store(stats + 4, f32(1) if sinks != 0 else f32(0))


@jit.inner
def _query_scale(args, position):  # type: ignore[no-untyped-def]
    """What a query at that position is multiplied by."""
    scale = simd.load(types.float64, args + 8 * _SCALE)
    temperature = simd.load(types.float64, args + 8 * _TEMPERATURE)
    if temperature != 0:
        scale *= 1 + temperature * math.log(1 + position // field(args, _TEMPERATURE_CONTEXT))
    return simd.convert(f32, scale)


@jit.inner
def _finish(total, stats, out, value_length):  # type: ignore[no-untyped-def]
    """out = total / sum of weights."""
    weight = simd.load(f32, stats + 4)
    whole = value_length & -LANES
    for i in range(0, whole, LANES):
        simd.store(out + 4 * i, simd.load(f32x16, total + 4 * i) / weight)
    for i in range(whole, value_length):
        simd.store(out + 4 * i, simd.load(f32, total + 4 * i) / weight)


@jit.inner
def _piece_heads(group, units, nth):  # type: ignore[no-untyped-def]
    """How many of a KV head's query heads one unit of work takes: no more than a tile has rows, and fewer while threads would stand idle.
    A row's bits do not depend on the rows beside it."""
    pieces = (group + TILE_ROWS - 1) // TILE_ROWS
    while units * pieces < nth and group >= 2 * pieces * PIECE_HEADS:
        pieces *= 2
    return (group + pieces - 1) // pieces


@unrolled
def _workspace(args: Value, tid: Value, rows: Value, score_row: Value) -> tuple[Value, ...]:
    """Where a thread has, of a unit's rows: queries, scores of a span, sums of values (a chunk's, then all so far), weights lane by
    lane, largest scores, factors, ones, and what `_fold` knows of the chunks so far."""
    place = field(args, _SCRATCH) + tid * field(args, _SCRATCH_STRIDE)
    key_row, row = _whole(field(args, _HEAD_DIM)), _whole(field(args, _VALUE_LENGTH))
    places = []
    for row_bytes in (key_row * 4, score_row, row * 4, row * 4, 4 * LANES, 4, 4, 4, 8):
        places.append(place)
        place = place + rows * row_bytes
    return tuple(places)


@jit.inner
def _start_rows(args, item, first_head, group, work, n_rows, padded):  # type: ignore[no-untyped-def]
    """The queries of a unit's rows, scaled, and nothing seen by any of them yet."""
    queries, _, _, totals, _, _, _, _, stats = work
    head_dim, row = field(args, _HEAD_DIM), _whole(field(args, _VALUE_LENGTH))
    key_row, first, position = _whole(head_dim), index(item, _FIRST), index(item, _POSITION)
    for r in range(n_rows):
        head = first_head + r % group
        source = field(args, _Q) + (first + r // group) * field(args, _Q_STRIDE) + head * field(args, _Q_HEAD_STRIDE)
        _scaled(source, _query_scale(args, position + r // group), queries + 4 * r * key_row, head_dim)
        _start_total(totals + 4 * r * row, stats + 8 * r, row, field(args, _SINKS), head)
    _clear(queries + 4 * n_rows * key_row, (padded - n_rows) * key_row)


@jit.inner
def _attend_chunk(args, item, chunk, span_blocks, kv_head, group, work, n_rows, padded):  # type: ignore[no-untyped-def]
    """A unit's rows against the keys and values of one chunk, span by span: weighted sums of values, weights lane by lane, largest
    scores."""
    queries, scores, sums, _, lane_weights, largest, factors, ones, _ = work
    head_dim, block_size, window = field(args, _HEAD_DIM), field(args, _BLOCK_SIZE), field(args, _WINDOW)
    k_product, k_bytes, k_stride = field(args, _K_PRODUCT_FN), field(args, _K_BYTES), field(args, _K_STRIDE)
    v_product, v_bytes, v_stride = field(args, _V_PRODUCT_FN), field(args, _V_BYTES), field(args, _V_STRIDE)
    k_cache = field(args, _K_CACHE) + kv_head * field(args, _NUM_BLOCKS) * k_bytes
    v_cache = field(args, _V_CACHE) + kv_head * field(args, _NUM_BLOCKS) * v_bytes
    key_row, row, score_row = _whole(head_dim), _whole(field(args, _VALUE_LENGTH)), 4 * span_blocks * block_size
    chunk_blocks, rows = field(args, _CHUNK_TOKENS) // block_size, _whole(padded)
    table = field(args, _BLOCK_TABLES) + index(item, _SEQ) * field(args, _BLOCK_TABLES_STRIDE)
    position = index(item, _POSITION)
    last = position + index(item, _TOKENS) - 1
    first_block = chunk * chunk_blocks
    first_seen = max(0, position - window + 1) // block_size if window > 0 else 0  # block of the first key any of the tokens sees
    if first_seen > first_block:
        first_block += (first_seen - first_block) // span_blocks * span_blocks
    last_block = min((chunk + 1) * chunk_blocks - 1, last // block_size)
    _clear(lane_weights, rows * LANES)
    for r in range(0, rows, LANES):
        simd.store(largest + 4 * r, simd.splat(f32x16, f32(_LOWEST)))
        simd.store(ones + 4 * r, simd.splat(f32x16, f32(1)))
    for start in range(first_block, last_block + 1, span_blocks):
        stop = min(start + span_blocks, last_block + 1)
        seen = min(last + 1, stop * block_size) - start * block_size
        columns = _whole(seen)
        for block in range(start, stop):
            # while keys are read their values are asked for, and the next span's keys while values are read
            place, column = index(table, block), (block - start) * block_size
            keys, values = k_cache + place * k_bytes, v_cache + place * v_bytes
            call_product(
                k_product, queries, 4 * key_row, padded, keys, k_stride, head_dim,
                scores + 4 * column, score_row, min(block_size, columns - column), 0, values, keys + k_stride * head_dim,
            )  # fmt: skip
        visible = position + 1 - start * block_size
        _weigh(scores, score_row, columns, n_rows, group, visible, window, largest, factors, lane_weights)
        for block in range(start, stop):
            place, column = index(table, block), (block - start) * block_size
            values = v_cache + place * v_bytes
            ahead = index(table, min(block + span_blocks, last // block_size))
            multipliers = ones if block > start else factors if start > first_block else 0
            call_product(
                v_product, scores + 4 * column, score_row, padded, values, v_stride,
                min(block_size, seen - column), sums, 4 * row, row, multipliers, k_cache + ahead * k_bytes,
                values + v_stride * block_size,
            )  # fmt: skip


@jit.inner
def _end_chunk(args, item, first_head, group, work, n_rows):  # type: ignore[no-untyped-def]
    """A chunk's results: folded into those so far, or put where `attention_merge` finds them."""
    _, _, sums, totals, lane_weights, largest, _, _, stats = work
    n_heads, row, slot = field(args, _N_HEADS), _whole(field(args, _VALUE_LENGTH)), index(item, _SLOT)
    for r in range(n_rows):
        weight = simd.hsum(simd.load(f32x16, lane_weights + 4 * LANES * r))
        if slot < 0:
            _fold(sums + 4 * r * row, simd.load(f32, largest + 4 * r), weight, totals + 4 * r * row, stats + 8 * r, row)
        else:
            head = first_head + r % group
            to = field(args, _PARTIALS) + 4 * (row + LANES) * ((slot + r // group * index(item, _SLOT_STRIDE)) * n_heads + head)
            for i in range(0, row, LANES):
                simd.store(to + 4 * i, simd.load(f32x16, sums + 4 * (r * row + i)))
            simd.store(to + 4 * row, simd.load(f32, largest + 4 * r))
            simd.store(to + 4 * row + 4, weight)


@jit.op
def attention(args, tid, nth):  # type: ignore[no-untyped-def]
    """Attention of this thread's share of the plan's items."""
    n_kv_heads, block_size, value_length = field(args, _N_KV_HEADS), field(args, _BLOCK_SIZE), field(args, _VALUE_LENGTH)
    plan, n_items = field(args, _PLAN), index(field(args, _PLAN), _N_ITEMS)
    all_heads = field(args, _N_HEADS) // n_kv_heads  # of one KV head
    piece = _piece_heads(all_heads, n_items * n_kv_heads, nth)
    pieces = (all_heads + piece - 1) // piece
    span_blocks = min(max(1, SPAN_VALUES // (field(args, _HEAD_DIM) * block_size)), field(args, _CHUNK_TOKENS) // block_size)
    # Units of work: every item for the first KV head (the first piece of its query heads, then the next), then for the next one, so that
    # neighbouring units read neighbouring keys and values.
    # A thread takes those that begin in its share of all products: one run of units, and about as much work as the others have.
    total = index(plan, _TOTAL)
    begin, end = total * n_kv_heads * pieces * tid // nth, total * n_kv_heads * pieces * (tid + 1) // nth
    for unit in range(begin // max(total, 1) * n_items, n_items * n_kv_heads * pieces):
        kv_head, part = unit // n_items // pieces, unit // n_items % pieces
        item = plan + 4 * (_HEAD_WORDS + _ITEM_WORDS * (unit % n_items))
        before = unit // n_items * total + index(item, _BEFORE)
        if before < begin:
            continue
        if before >= end:
            break
        first_head = kv_head * all_heads + part * piece
        group = min(piece, all_heads - part * piece)
        n_rows = index(item, _TOKENS) * group
        padded = padded_rows(n_rows)
        work = _workspace(args, tid, _whole(padded), 4 * span_blocks * block_size)
        _start_rows(args, item, first_head, group, work, n_rows, padded)
        for chunk in range(index(item, _CHUNK), index(item, _CHUNK_STOP)):
            _attend_chunk(args, item, chunk, span_blocks, kv_head, group, work, n_rows, padded)
            _end_chunk(args, item, first_head, group, work, n_rows)
        if index(item, _SLOT) < 0:
            _, _, _, totals, _, _, _, _, stats = work
            row = _whole(value_length)
            for r in range(n_rows):
                out = field(args, _OUT) + (index(item, _FIRST) + r // group) * field(args, _OUT_STRIDE)
                _finish(totals + 4 * r * row, stats + 8 * r, out + 4 * value_length * (first_head + r % group), value_length)


@jit.op
def attention_merge(args, tid, nth):  # type: ignore[no-untyped-def]
    """Fold the chunks of the tokens whose chunks were shared out."""
    plan, n_heads, value_length = field(args, _PLAN), field(args, _N_HEADS), field(args, _VALUE_LENGTH)
    merges = plan + 4 * (_HEAD_WORDS + _ITEM_WORDS * field(args, _MAX_ITEMS))
    row = _whole(value_length)
    total = field(args, _SCRATCH) + tid * field(args, _SCRATCH_STRIDE)
    stats = total + 4 * row
    for unit in range(tid, index(plan, _N_MERGES) * n_heads, nth):
        merge, head = merges + 4 * _MERGE_WORDS * (unit // n_heads), unit % n_heads
        _start_total(total, stats, row, field(args, _SINKS), head)
        for chunk in range(index(merge, _M_CHUNKS)):
            part = field(args, _PARTIALS) + 4 * (row + LANES) * ((index(merge, _M_SLOT) + chunk) * n_heads + head)
            _fold(part, simd.load(f32, part + 4 * row), simd.load(f32, part + 4 * row + 4), total, stats, row)
        out = field(args, _OUT) + index(merge, _M_TOKEN) * field(args, _OUT_STRIDE) + 4 * value_length * head
        _finish(total, stats, out, value_length)
