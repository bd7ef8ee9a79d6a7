"""Rows picked by index: token embeddings out of the (encoded) table, and the hidden rows whose logits are wanted; whole tables decoded.

Must not know encodings: a table's rows are decoded by the encoding's decode kernel, by address.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.fields import field
from vllm_cpp.kernels.simd import f32, i32, i64, load, store

EMBED_FIELDS = (
    "count",  # address of the int64 number of tokens
    "tokens",  # i32[n] token ids
    "w", "w_stride", "k", "decode_fn",  # table rows; bytes between two; values a row; the encoding's decode kernel
    "out", "out_stride",  # f32 rows
)  # fmt: skip
_COUNT, _TOKENS, _W, _W_STRIDE, _K, _DECODE_FN, _OUT, _OUT_STRIDE = range(len(EMBED_FIELDS))

GATHER_FIELDS = (
    "count",  # address of the int64 number of rows wanted
    "index",  # i32[n] which rows
    "x", "x_stride", "width",  # f32 rows; bytes between two; values a row
    "out", "out_stride",  # f32 rows
)  # fmt: skip
_G_COUNT, _G_INDEX, _G_X, _G_X_STRIDE, _G_WIDTH, _G_OUT, _G_OUT_STRIDE = range(len(GATHER_FIELDS))


@jit.op
def embed(args, tid, nth):  # type: ignore[no-untyped-def]
    """out[t] = decoded table row of tokens[t]; tokens shared out over threads."""
    n = load(i64, field(args, _COUNT))
    for t in range(tid, n, nth):
        token = load(i32, field(args, _TOKENS) + 4 * t)
        jit.call_decode(
            field(args, _DECODE_FN),
            field(args, _W) + token * field(args, _W_STRIDE),
            field(args, _K),
            field(args, _OUT) + t * field(args, _OUT_STRIDE),
        )


@jit.function(6)
def decode_rows(decode_fn, w, stride, n_rows, k, out):  # type: ignore[no-untyped-def]
    """out f32[n_rows, k] = decoded weight rows, `stride` bytes apart."""
    for r in range(n_rows):
        jit.call_decode(decode_fn, w + r * stride, k, out + 4 * k * r)


@jit.op
def gather(args, tid, nth):  # type: ignore[no-untyped-def]
    """out[i] = x[index[i]]."""
    n = load(i64, field(args, _G_COUNT))
    for i in range(tid, n, nth):
        source = field(args, _G_X) + load(i32, field(args, _G_INDEX) + 4 * i) * field(args, _G_X_STRIDE)
        to = field(args, _G_OUT) + i * field(args, _G_OUT_STRIDE)
        for j in range(field(args, _G_WIDTH)):
            store(to + 4 * j, load(f32, source + 4 * j))
