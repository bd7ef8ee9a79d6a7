"""Products with a tower that has one matrix a head (or group): every head's part of a row is multiplied by its own matrix.

Owns `out[t, h] = W[h] . x[t, h]`, shared out over heads and rows together, and the copying of parts that pass a product by. Must not know
encodings: row and tile kernels come by address and give the same bits for the same pair, as in `matmul.py`; nor what heads are for.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.fields import field, share
from vllm_cpp.kernels.cpu.matmul import SPLIT_ROWS, product
from vllm_cpp.kernels.simd import f32, f32x16, i64, load, store

LANES = 16

PRODUCT_FIELDS = (
    "count",  # address of the int64 number of tokens
    "n_heads", "k", "n_rows",  # matrices; values of a head's activation row; rows of a matrix
    "act", "act_stride", "act_head",  # activation rows in the layout the encoding wants; bytes from a token, and from a head, to the next
    "w", "w_stride", "slice_bytes",  # first row of the first matrix; bytes from a row, and from a matrix, to the next
    "rows_fn", "tile_fn",  # the encoding's kernels
    "scale",  # f32[n_heads] the products are multiplied by, or 0
    "out", "out_stride", "out_head",  # f32 rows; bytes from a token, and from a head, to the next
    "scratch", "scratch_stride", "max_count",  # per thread: scratch_bytes(max_count, ...)
)  # fmt: skip
(_COUNT, _N_HEADS, _K, _N_ROWS, _ACT, _ACT_STRIDE, _ACT_HEAD, _W, _W_STRIDE, _SLICE_BYTES, _ROWS_FN, _TILE_FN, _SCALE, _OUT, _OUT_STRIDE,
 _OUT_HEAD, _SCRATCH, _SCRATCH_STRIDE, _MAX_COUNT) = range(len(PRODUCT_FIELDS))  # fmt: skip

COPY_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "width",  # f32 rows; bytes between two; values copied of each
    "repeat",  # how many rows in succession one row of x is copied to
    "out", "out_stride",  # f32 rows
)  # fmt: skip
_C_COUNT, _C_X, _C_X_STRIDE, _C_WIDTH, _C_REPEAT, _C_OUT, _C_OUT_STRIDE = range(len(COPY_FIELDS))


def scratch_bytes(max_count: int, tile_scratch_bytes: int) -> int:
    """Bytes a thread needs: two address tables int64[max_count] and the tile kernel's own."""
    return 16 * max_count + tile_scratch_bytes + 128


@jit.op
def heads_product(args, tid, nth):  # type: ignore[no-untyped-def]
    """out[t, h, r] = (W[h][r] . act[t, h]) * scale[h], this thread's run of (head, rows)."""
    n = load(i64, field(args, _COUNT))
    n_rows, w_stride, k, scale = field(args, _N_ROWS), field(args, _W_STRIDE), field(args, _K), field(args, _SCALE)
    units = (n_rows + SPLIT_ROWS - 1) // SPLIT_ROWS
    total = field(args, _N_HEADS) * units
    at, last = share(total, 1, tid, nth), share(total, 1, tid + 1, nth)
    acts = field(args, _SCRATCH) + tid * field(args, _SCRATCH_STRIDE)
    outs = acts + 8 * field(args, _MAX_COUNT)
    tile_scratch = outs + 8 * field(args, _MAX_COUNT)
    if n <= 0:
        return
    while at < last:
        head = at // units
        stop = min(last, (head + 1) * units)
        first, end = (at - head * units) * SPLIT_ROWS, min(n_rows, (stop - head * units) * SPLIT_ROWS)
        for t in range(n):
            store(acts + 8 * t, field(args, _ACT) + t * field(args, _ACT_STRIDE) + head * field(args, _ACT_HEAD))
            store(outs + 8 * t, field(args, _OUT) + t * field(args, _OUT_STRIDE) + head * field(args, _OUT_HEAD) + 4 * first)
        w = field(args, _W) + head * field(args, _SLICE_BYTES) + first * w_stride
        product(field(args, _ROWS_FN), field(args, _TILE_FN), w, w_stride, end - first, k, acts, n, outs, tile_scratch)
        if scale != 0:
            factor = load(f32, scale + 4 * head)
            for t in range(n):
                out = load(i64, outs + 8 * t)
                for r in range(end - first):
                    store(out + 4 * r, load(f32, out + 4 * r) * factor)
        at = stop


@jit.op
def copy_rows(args, tid, nth):  # type: ignore[no-untyped-def]
    """out[i, :width] = x[i // repeat, :width]; rows are shared out over threads."""
    n, width, repeat = load(i64, field(args, _C_COUNT)), field(args, _C_WIDTH), field(args, _C_REPEAT)
    whole = width & -LANES
    for i in range(share(n, 1, tid, nth), share(n, 1, tid + 1, nth)):
        x, out = field(args, _C_X) + i // repeat * field(args, _C_X_STRIDE), field(args, _C_OUT) + i * field(args, _C_OUT_STRIDE)
        for j in range(0, whole, LANES):
            simd.store(out + 4 * j, simd.load(f32x16, x + 4 * j))
        for j in range(whole, width):
            store(out + 4 * j, load(f32, x + 4 * j))
