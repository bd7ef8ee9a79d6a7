"""Routed experts: each chosen expert's slice is read once a step and applied to all rows that chose it.

Owns the expert-major products and the weighted sum. Must not know encodings (row and tile kernels come by address) nor where a slice lives:
it asks `slice_address`, and cannot tell resident, borrowed or streamed apart. Pairs are (token, slot of its top-k), numbered token * top_k
+ slot; the router's `group_by_expert` has sorted them by expert (`offsets`, `pairs`).

Where slices are streamed, another operation computes the same: it takes the experts of a wave in the order in which their slices arrive.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, libc
from vllm_cpp.kernels.cpu.elementwise import GELU_ALONE, SQUARED_RELU, activate_span
from vllm_cpp.kernels.cpu.fields import field, index, number, set_index, share
from vllm_cpp.kernels.cpu.matmul import SPLIT_ROWS, product
from vllm_cpp.kernels.cpu.slots import READY, ended_reads, place_of, state_of, wait_for_read
from vllm_cpp.kernels.simd import f32, i32, i64, load, store

# A projection's record: where its rows stand in the slices of a tower, of which they are all or a part.
TOWER_FIELDS = (
    "base", "slice_bytes",  # its first row in expert 0's slice; bytes between two slices
    "places",  # 0, or where a streamed tower's slices are at present (see slots.py)
    "offset",  # bytes of a slice that stand before its first row
)  # fmt: skip
_BASE, _SLICE_BYTES, _PLACES, _OFFSET = range(len(TOWER_FIELDS))

# The work list of a layer whose slices are streamed; all 0 in the records of one whose slices are not.
WAVE_FIELDS = (
    "wave", "n_wave",  # i32: the experts whose slices are there or on their way; address of the int64 how many
    "waiting", "waiting_stride",  # per thread: i32[n_experts]
    "ended",  # address of the store's count of reads that have ended
)  # fmt: skip

UP_FIELDS = (
    "n_experts", "top_k",
    "offsets", "pairs",  # i32[n_experts + 1], i32[n_pairs]: expert e's pairs are pairs[offsets[e]:offsets[e + 1]]
    "kind", "limit",  # of the activation (see elementwise.py); the limit is a float
    "act", "act_stride",  # the tokens' activation rows
    # records; bytes between two weight rows; kernels; f32[n_experts] or 0; where expert 0's n_rows f32 stand, or 0. Where the kind has no
    # gate, its record is that of `up`, and nothing else of it is read.
    "gate_tower", "gate_stride", "gate_rows_fn", "gate_tile_fn", "gate_scale", "gate_bias",
    "up_tower", "up_stride", "up_rows_fn", "up_tile_fn", "up_scale", "up_bias",
    "bias_stride",  # bytes between two experts' biases
    "k", "n_rows",  # values of an activation row; hidden units of an expert
    "gate_out", "up_out", "out_stride",  # f32 rows, one a pair; bytes between two; gate_out ends up holding the hidden units
    "up_act",  # the activation rows `up` wants (they differ from `act` where gate and up are encoded differently)
    "up_act_stride",
    "scratch", "scratch_stride", "max_count",
    *WAVE_FIELDS,
)  # fmt: skip
(_N_EXPERTS, _TOP_K, _OFFSETS, _PAIRS, _KIND, _LIMIT, _ACT, _ACT_STRIDE, _GATE_TOWER, _GATE_STRIDE, _GATE_ROWS_FN, _GATE_TILE_FN,
 _GATE_SCALE, _GATE_BIAS, _UP_TOWER, _UP_STRIDE, _UP_ROWS_FN, _UP_TILE_FN, _UP_SCALE, _UP_BIAS, _BIAS_STRIDE, _K, _N_ROWS, _GATE_OUT,
 _UP_OUT, _OUT_STRIDE, _UP_ACT, _UP_ACT_STRIDE, _SCRATCH, _SCRATCH_STRIDE, _MAX_COUNT, _WAVE, _N_WAVE, _WAITING, _WAITING_STRIDE,
 _ENDED) = range(len(UP_FIELDS))  # fmt: skip

DOWN_FIELDS = (
    "n_experts",
    "offsets", "pairs",
    "act", "act_stride",  # the pairs' activation rows
    "tower", "stride", "rows_fn", "tile_fn", "scale", "bias",  # bias: f32[n_experts, n_rows], or 0
    "k", "n_rows",  # hidden units; values of an output row
    "out", "out_stride",  # f32 rows, one a pair; bytes between two
    "scratch", "scratch_stride", "max_count",
    *WAVE_FIELDS,
)  # fmt: skip
(_D_N_EXPERTS, _D_OFFSETS, _D_PAIRS, _D_ACT, _D_ACT_STRIDE, _D_TOWER, _D_STRIDE, _D_ROWS_FN, _D_TILE_FN, _D_SCALE, _D_BIAS, _D_K,
 _D_N_ROWS, _D_OUT, _D_OUT_STRIDE, _D_SCRATCH, _D_SCRATCH_STRIDE, _D_MAX_COUNT, _D_WAVE, _D_N_WAVE, _D_WAITING, _D_WAITING_STRIDE,
 _D_ENDED) = range(len(DOWN_FIELDS))  # fmt: skip

ADVISE_FIELDS = (
    "offsets", "n_experts",
    "n_towers", "tower0", "tower1", "tower2",  # tower records
)  # fmt: skip
_V_OFFSETS, _V_N_EXPERTS, _V_N_TOWERS, _V_TOWER0, _, _ = range(len(ADVISE_FIELDS))
MAX_TOWERS = 3

COMBINE_FIELDS = (
    "count",  # address of the int64 number of tokens
    "top_k", "width",
    "weights",  # f32[n_tokens, top_k]
    "y", "y_stride",  # f32 rows, one a pair: the experts' outputs; bytes between two
    "x", "x_stride",  # f32 rows
    "accumulate",  # 1: add to what stands in x
)  # fmt: skip
_C_COUNT, _C_TOP_K, _C_WIDTH, _C_WEIGHTS, _C_Y, _C_Y_STRIDE, _C_X, _C_X_STRIDE, _C_ACCUMULATE = range(len(COMBINE_FIELDS))


def scratch_bytes(max_pairs: int, tile_scratch_bytes: int) -> int:
    """Bytes a thread needs: two address tables int64[max_pairs] and the tile kernel's own."""
    return 16 * max_pairs + tile_scratch_bytes + 128


@jit.inner
def slice_address(tower, expert):  # type: ignore[no-untyped-def]
    """Where a projection's first weight row of one expert stands."""
    places = field(tower, _PLACES)
    if places != 0:
        return place_of(places, expert) + field(tower, _OFFSET)
    return field(tower, _BASE) + expert * field(tower, _SLICE_BYTES)


@jit.inner
def slice_state(tower, expert):  # type: ignore[no-untyped-def]
    """Of a streamed tower: READY, not yet, or below 0 never."""
    return state_of(field(tower, _PLACES), expert)


@jit.inner
def list_wave(wave, n_wave, waiting):  # type: ignore[no-untyped-def]
    """Copy the wave to a thread's own list; its length."""
    n = field(n_wave, 0)
    for i in range(n):
        set_index(waiting, i, index(wave, i))
    return n


@jit.inner
def scale_rows(pairs, n, out, out_stride, first, last, factor):  # type: ignore[no-untyped-def]
    for i in range(n):
        row = out + out_stride * load(i32, pairs + 4 * i)
        for r in range(first, last):
            store(row + 4 * r, load(f32, row + 4 * r) * factor)


@jit.inner
def add_bias(pairs, n, out, out_stride, first, last, bias):  # type: ignore[no-untyped-def]
    for i in range(n):
        row = out + out_stride * load(i32, pairs + 4 * i)
        for r in range(first, last):
            store(row + 4 * r, load(f32, row + 4 * r) + load(f32, bias + 4 * r))


@jit.inner
def point(pairs, n, act, act_stride, divisor, acts, out, out_stride, first, outs):  # type: ignore[no-untyped-def]
    """Fill the two address tables: pair p reads activation row p // divisor and writes output row p, from column `first`."""
    for i in range(n):
        pair = load(i32, pairs + 4 * i)
        store(acts + 8 * i, act + pair // divisor * act_stride)
        store(outs + 8 * i, out + out_stride * pair + 4 * first)


@jit.inner
def _up_of(args, tid, first, last, e):  # type: ignore[no-untyped-def]
    """Rows first ... last - 1 of expert e: gate_out[p, r] = the activation of gate_e[r] . act[token of p] and up_e[r] . up_act[token of
    p], each times its scale, plus its bias."""
    start = index(field(args, _OFFSETS), e)
    n = index(field(args, _OFFSETS), e + 1) - start
    if n == 0:
        return
    k, top_k, kind = field(args, _K), field(args, _TOP_K), field(args, _KIND)
    gate_out, up_out, out_stride = field(args, _GATE_OUT), field(args, _UP_OUT), field(args, _OUT_STRIDE)
    gate_stride, up_stride = field(args, _GATE_STRIDE), field(args, _UP_STRIDE)
    acts = field(args, _SCRATCH) + tid * field(args, _SCRATCH_STRIDE)
    outs = acts + 8 * field(args, _MAX_COUNT)
    tile_scratch = outs + 8 * field(args, _MAX_COUNT)
    pairs = field(args, _PAIRS) + 4 * start
    if kind != SQUARED_RELU and kind != GELU_ALONE:
        gate = slice_address(field(args, _GATE_TOWER), e) + first * gate_stride
        point(pairs, n, field(args, _ACT), field(args, _ACT_STRIDE), top_k, acts, gate_out, out_stride, first, outs)
        product(field(args, _GATE_ROWS_FN), field(args, _GATE_TILE_FN), gate, gate_stride, last - first, k, acts, n, outs, tile_scratch)
        if field(args, _GATE_SCALE) != 0:
            scale_rows(pairs, n, gate_out, out_stride, first, last, load(f32, field(args, _GATE_SCALE) + 4 * e))
        if field(args, _GATE_BIAS) != 0:
            add_bias(pairs, n, gate_out, out_stride, first, last, field(args, _GATE_BIAS) + e * field(args, _BIAS_STRIDE))
    up = slice_address(field(args, _UP_TOWER), e) + first * up_stride
    point(pairs, n, field(args, _UP_ACT), field(args, _UP_ACT_STRIDE), top_k, acts, up_out, out_stride, first, outs)
    product(field(args, _UP_ROWS_FN), field(args, _UP_TILE_FN), up, up_stride, last - first, k, acts, n, outs, tile_scratch)
    if field(args, _UP_SCALE) != 0:
        scale_rows(pairs, n, up_out, out_stride, first, last, load(f32, field(args, _UP_SCALE) + 4 * e))
    if field(args, _UP_BIAS) != 0:
        add_bias(pairs, n, up_out, out_stride, first, last, field(args, _UP_BIAS) + e * field(args, _BIAS_STRIDE))
    for i in range(n):
        at = out_stride * load(i32, pairs + 4 * i) + 4 * first
        activate_span(kind, number(args, _LIMIT), gate_out + at, up_out + at, gate_out + at, last - first)


@jit.op
def experts_up(args, tid, nth):  # type: ignore[no-untyped-def]
    """The hidden units of every pair, this thread's rows."""
    n_rows = field(args, _N_ROWS)
    first = share(n_rows, SPLIT_ROWS, tid, nth)
    last = share(n_rows, SPLIT_ROWS, tid + 1, nth)
    if first >= last:
        return
    for e in range(field(args, _N_EXPERTS)):
        _up_of(args, tid, first, last, e)


@jit.op
def experts_up_streamed(args, tid, nth):  # type: ignore[no-untyped-def]
    """The same for the experts of a wave, each as soon as its slices are there. One that cannot be read is left out: the step is lost."""
    n_rows = field(args, _N_ROWS)
    first = share(n_rows, SPLIT_ROWS, tid, nth)
    last = share(n_rows, SPLIT_ROWS, tid + 1, nth)
    if first >= last:
        return
    waiting, ended = field(args, _WAITING) + tid * field(args, _WAITING_STRIDE), field(args, _ENDED)
    left, spins = list_wave(field(args, _WAVE), field(args, _N_WAVE), waiting), 0
    while left > 0:
        kept, seen = 0, ended_reads(ended)
        for i in range(left):
            e = index(waiting, i)
            gate, up = slice_state(field(args, _GATE_TOWER), e), slice_state(field(args, _UP_TOWER), e)
            if gate == READY and up == READY:
                _up_of(args, tid, first, last, e)
            elif gate >= 0 and up >= 0:
                set_index(waiting, kept, e)
                kept += 1
        spins = spins + 1 if kept == left else 0
        left = kept
        if spins > 0:
            wait_for_read(ended, seen, spins)


@jit.inner
def _down_of(args, tid, first, last, e):  # type: ignore[no-untyped-def]
    """Rows first ... last - 1 of expert e: out[p, r] = down_e[r] . act[p], times its scale, plus its bias."""
    start = index(field(args, _D_OFFSETS), e)
    n = index(field(args, _D_OFFSETS), e + 1) - start
    if n == 0:
        return
    k, out, out_stride, stride = field(args, _D_K), field(args, _D_OUT), field(args, _D_OUT_STRIDE), field(args, _D_STRIDE)
    acts = field(args, _D_SCRATCH) + tid * field(args, _D_SCRATCH_STRIDE)
    outs = acts + 8 * field(args, _D_MAX_COUNT)
    tile_scratch = outs + 8 * field(args, _D_MAX_COUNT)
    pairs = field(args, _D_PAIRS) + 4 * start
    w = slice_address(field(args, _D_TOWER), e) + first * stride
    point(pairs, n, field(args, _D_ACT), field(args, _D_ACT_STRIDE), 1, acts, out, out_stride, first, outs)
    product(field(args, _D_ROWS_FN), field(args, _D_TILE_FN), w, stride, last - first, k, acts, n, outs, tile_scratch)
    if field(args, _D_SCALE) != 0:
        scale_rows(pairs, n, out, out_stride, first, last, load(f32, field(args, _D_SCALE) + 4 * e))
    if field(args, _D_BIAS) != 0:
        add_bias(pairs, n, out, out_stride, first, last, field(args, _D_BIAS) + 4 * e * field(args, _D_N_ROWS))


@jit.op
def experts_down(args, tid, nth):  # type: ignore[no-untyped-def]
    """The output of every pair's expert, this thread's rows."""
    n_rows = field(args, _D_N_ROWS)
    first = share(n_rows, SPLIT_ROWS, tid, nth)
    last = share(n_rows, SPLIT_ROWS, tid + 1, nth)
    if first >= last:
        return
    for e in range(field(args, _D_N_EXPERTS)):
        _down_of(args, tid, first, last, e)


@jit.op
def experts_down_streamed(args, tid, nth):  # type: ignore[no-untyped-def]
    """The same for the experts of a wave, each as soon as its slice is there."""
    n_rows = field(args, _D_N_ROWS)
    first = share(n_rows, SPLIT_ROWS, tid, nth)
    last = share(n_rows, SPLIT_ROWS, tid + 1, nth)
    if first >= last:
        return
    waiting, ended = field(args, _D_WAITING) + tid * field(args, _D_WAITING_STRIDE), field(args, _D_ENDED)
    left, spins = list_wave(field(args, _D_WAVE), field(args, _D_N_WAVE), waiting), 0
    while left > 0:
        kept, seen = 0, ended_reads(ended)
        for i in range(left):
            e = index(waiting, i)
            state = slice_state(field(args, _D_TOWER), e)
            if state == READY:
                _down_of(args, tid, first, last, e)
            elif state >= 0:
                set_index(waiting, kept, e)
                kept += 1
        spins = spins + 1 if kept == left else 0
        left = kept
        if spins > 0:
            wait_for_read(ended, seen, spins)


@jit.op
def advise(args, tid, nth):  # type: ignore[no-untyped-def]
    """Ask the kernel to read the chosen experts' slices into the page cache, all at once, before each would be waited for page by page."""
    offsets, number = field(args, _V_OFFSETS), 0
    for t in range(field(args, _V_N_TOWERS)):
        tower = field(args, _V_TOWER0 + t)
        n_bytes = field(tower, _SLICE_BYTES)
        for e in range(field(args, _V_N_EXPERTS)):
            if index(offsets, e + 1) == index(offsets, e):
                continue
            if number % nth == tid:
                first = slice_address(tower, e)
                page = first & -libc.PAGE
                libc.madvise(page, first + n_bytes - page, libc.MADV_WILLNEED)
            number += 1


@jit.op
def combine(args, tid, nth):  # type: ignore[no-untyped-def]
    """x[t] (+)= sum over slots j of weights[t, j] * y[t * top_k + j], the slots in their order, whatever the order the experts were
    computed in."""
    accumulate = field(args, _C_ACCUMULATE)
    n, top_k, width = load(i64, field(args, _C_COUNT)), field(args, _C_TOP_K), field(args, _C_WIDTH)
    first = share(width, SPLIT_ROWS, tid, nth)
    last = share(width, SPLIT_ROWS, tid + 1, nth)
    for t in range(n):
        x = field(args, _C_X) + t * field(args, _C_X_STRIDE)
        weights = field(args, _C_WEIGHTS) + 4 * t * top_k
        y_stride = field(args, _C_Y_STRIDE)
        y = field(args, _C_Y) + t * top_k * y_stride
        for r in range(first, last):
            total = load(f32, weights) * load(f32, y + 4 * r)
            for j in range(1, top_k):
                total = total + load(f32, weights + 4 * j) * load(f32, y + j * y_stride + 4 * r)
            store(x + 4 * r, load(f32, x + 4 * r) + total if accumulate != 0 else total)
