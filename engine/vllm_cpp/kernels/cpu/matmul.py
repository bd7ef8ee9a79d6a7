"""Matrix products of a step: weight rows in place times activation rows, with bias, scale and residual addition.

Owns how rows are shared among threads and how one row and many rows take different kernels. Must not know encodings: it calls the row and
tile kernels by address (see `encodings/`), which give the same bits for the same pair, so a result never depends on the split or on the
batch.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.fields import field, share
from vllm_cpp.kernels.simd import f32, i64, load, store

FIELDS = (
    "count",  # address of the int64 number of activation rows
    "act", "act_stride",  # activation rows in the layout the encoding wants; bytes between two
    "w", "w_stride", "k",  # weight rows; bytes between two; values a row
    "n_rows",  # weight rows = values of an output row
    "out", "out_stride",  # f32 output rows; bytes between two
    "rows_fn", "tile_fn",  # the encoding's kernels
    "bias",  # address of f32[n_rows], or 0
    "scale",  # address of one f32 the product is multiplied by, or 0
    "accumulate",  # 1: add to what stands in out
    "scratch", "scratch_stride",  # per thread: TABLES, then TILE, then SUMS (see scratch_bytes)
    "tile_scratch_bytes", "max_count",
)  # fmt: skip
(_COUNT, _ACT, _ACT_STRIDE, _W, _W_STRIDE, _K, _N_ROWS, _OUT, _OUT_STRIDE, _ROWS_FN, _TILE_FN, _BIAS, _SCALE, _ACCUMULATE, _SCRATCH,
 _SCRATCH_STRIDE,
 _TILE_SCRATCH_BYTES, _MAX_COUNT) = range(len(FIELDS))  # fmt: skip

# Output rows handled at a time when the product must be kept apart from the output (accumulate): small enough to stay in the first cache
# level.
BLOCK_ROWS = 64
# A thread's share starts at a multiple of this many rows, so that two threads do not write one cache line.
SPLIT_ROWS = 16


def scratch_bytes(max_count: int, tile_scratch_bytes: int) -> int:
    """Bytes a thread needs: two address tables int64[max_count], the tile kernel's own, and f32[max_count, BLOCK_ROWS] of sums."""
    return 16 * max_count + tile_scratch_bytes + 4 * BLOCK_ROWS * max_count + 192


@jit.inner
def product(fn_rows, fn_tile, w, w_stride, n_rows, k, acts, n_acts, outs, tile_scratch):  # type: ignore[no-untyped-def]
    """Weight rows [n_rows] times the n_acts activation rows whose addresses stand at `acts`, to the f32 rows whose addresses stand at
    `outs`."""
    if n_acts == 1:
        jit.call_rows(fn_rows, w, w_stride, n_rows, k, load(i64, acts), load(i64, outs))
    else:
        jit.call_tile(fn_tile, w, w_stride, n_rows, k, acts, n_acts, outs, tile_scratch)


@jit.op
def matmul(args, tid, nth):  # type: ignore[no-untyped-def]
    """out[t, r] (+)= (w[r] . act[t]) * scale + bias[r] for every activation row t and every weight row r of this thread's share."""
    n_acts = load(i64, field(args, _COUNT))
    n_rows = field(args, _N_ROWS)
    first = share(n_rows, SPLIT_ROWS, tid, nth)
    last = share(n_rows, SPLIT_ROWS, tid + 1, nth)
    if n_acts <= 0 or first >= last:
        return
    act, act_stride = field(args, _ACT), field(args, _ACT_STRIDE)
    out, out_stride = field(args, _OUT), field(args, _OUT_STRIDE)
    w, w_stride, k = field(args, _W), field(args, _W_STRIDE), field(args, _K)
    rows_fn, tile_fn = field(args, _ROWS_FN), field(args, _TILE_FN)
    bias, scale, accumulate = field(args, _BIAS), field(args, _SCALE), field(args, _ACCUMULATE)
    factor = load(f32, scale) if scale != 0 else f32(1.0)
    acts = field(args, _SCRATCH) + tid * field(args, _SCRATCH_STRIDE)
    outs = acts + 8 * field(args, _MAX_COUNT)
    tile_scratch = outs + 8 * field(args, _MAX_COUNT)
    sums = (tile_scratch + field(args, _TILE_SCRATCH_BYTES) + 63) // 64 * 64
    for t in range(n_acts):
        store(acts + 8 * t, act + t * act_stride)
    if accumulate == 0:
        for t in range(n_acts):
            store(outs + 8 * t, out + t * out_stride + 4 * first)
        product(rows_fn, tile_fn, w + first * w_stride, w_stride, last - first, k, acts, n_acts, outs, tile_scratch)
        if bias != 0 or scale != 0:
            for t in range(n_acts):
                for r in range(first, last):
                    to = out + t * out_stride + 4 * r
                    value = load(f32, to) * factor
                    if bias != 0:
                        value = value + load(f32, bias + 4 * r)
                    store(to, value)
        return
    for t in range(n_acts):
        store(outs + 8 * t, sums + t * 4 * BLOCK_ROWS)
    for start in range(first, last, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, last)
        product(rows_fn, tile_fn, w + start * w_stride, w_stride, stop - start, k, acts, n_acts, outs, tile_scratch)
        for t in range(n_acts):
            for r in range(start, stop):
                value = load(f32, sums + 4 * (t * BLOCK_ROWS + r - start)) * factor
                if bias != 0:
                    value = value + load(f32, bias + 4 * r)
                to = out + t * out_stride + 4 * r
                store(to, load(f32, to) + value)
