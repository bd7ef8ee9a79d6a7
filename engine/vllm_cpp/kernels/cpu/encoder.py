"""What encoders compute that decoders do not: norms around the mean, and attention in which every token of a text sees every other.

Owns `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` for rows, and attention over keys and values that stand in the step's own rows:
a text is computed as a whole, so nothing of it is kept. Must not know models, nor how a text came into the step.

Attention takes the queries four at a time past all keys of their text: scores, their maximum, weights, then the weighted values, column by
column. Each query's arithmetic is the same in any company, and never depends on the threads.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.cpu.fields import field, index, number
from vllm_cpp.kernels.simd import f32, f32x16

LANES = 16
TILE = 4  # queries that share one pass over the keys
_LOWEST = -1e30  # below any score

LAYERNORM_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "width",  # f32 rows; bytes between two; values a row
    "weight", "bias",  # f32[width]
    "eps",  # float
    "out", "out_stride",  # f32 rows; may be x itself
)  # fmt: skip
_N_COUNT, _N_X, _N_X_STRIDE, _N_WIDTH, _N_WEIGHT, _N_BIAS, _N_EPS, _N_OUT, _N_OUT_STRIDE = range(len(LAYERNORM_FIELDS))

TEXT_ATTENTION_FIELDS = (
    "texts",  # address of the int64 number of texts
    "starts",  # i32[texts + 1]: row of each text's first token; behind the last text, the number of rows
    "q", "q_stride",  # f32[n_tokens, n_heads, head_dim]; bytes between two tokens
    "k", "k_stride", "v", "v_stride",  # f32[n_tokens, n_kv_heads, head_dim]
    "n_heads", "n_kv_heads", "head_dim",
    "scale",  # float scores are multiplied by
    "out", "out_stride",  # f32[n_tokens, n_heads, head_dim]
    "scratch", "scratch_stride",  # per thread: scratch_bytes(longest text)
)  # fmt: skip
(_TEXTS, _STARTS, _Q, _Q_STRIDE, _K, _K_STRIDE, _V, _V_STRIDE, _N_HEADS, _N_KV_HEADS, _HEAD_DIM, _SCALE, _OUT, _OUT_STRIDE, _SCRATCH,
 _SCRATCH_STRIDE) = range(len(TEXT_ATTENTION_FIELDS))  # fmt: skip


def scratch_bytes(max_tokens: int) -> int:
    """Bytes a thread needs: the scores of TILE queries with every token of the longest text."""
    return 4 * TILE * (-(-max_tokens // LANES) * LANES)


@jit.inner
def _sum_row(x, width, less, power):  # type: ignore[no-untyped-def]
    """Sum of x - less, or of its squares, in one fixed order."""
    whole = width & -LANES
    total = simd.zero(f32x16)
    for i in range(0, whole, LANES):
        u = simd.load(f32x16, x + 4 * i) - less
        total = total + u if power == 1 else simd.fma(u, u, total)
    rest = simd.hsum(total)
    for i in range(whole, width):
        value = simd.load(f32, x + 4 * i) - less
        rest = rest + value if power == 1 else simd.fma(value, value, rest)
    return rest


@jit.op
def layernorm(args, tid, nth):  # type: ignore[no-untyped-def]
    """out = (x - mean) / sqrt(mean of (x - mean)^2 + eps) * weight + bias, row by row."""
    width, weight, bias = field(args, _N_WIDTH), field(args, _N_WEIGHT), field(args, _N_BIAS)
    whole, n = width & -LANES, simd.convert(f32, width)
    for t in range(tid, field(field(args, _N_COUNT), 0), nth):
        x = field(args, _N_X) + t * field(args, _N_X_STRIDE)
        out = field(args, _N_OUT) + t * field(args, _N_OUT_STRIDE)
        mean = _sum_row(x, width, f32(0), 1) / n
        factor = f32(1) / simd.sqrt(_sum_row(x, width, mean, 2) / n + number(args, _N_EPS))
        for i in range(0, whole, LANES):
            scaled = (simd.load(f32x16, x + 4 * i) - mean) * factor
            simd.store(out + 4 * i, simd.fma(scaled, simd.load(f32x16, weight + 4 * i), simd.load(f32x16, bias + 4 * i)))
        for i in range(whole, width):
            scaled = (simd.load(f32, x + 4 * i) - mean) * factor
            simd.store(out + 4 * i, simd.fma(scaled, simd.load(f32, weight + 4 * i), simd.load(f32, bias + 4 * i)))


@jit.inner
def _scores(q0, q1, q2, q3, k, k_stride, n_keys, head_dim, scores, stride):  # type: ignore[no-untyped-def]
    """Products of four queries with all keys; behind the last key, up to a whole vector, the lowest number."""
    whole = head_dim & -LANES
    for j in range(n_keys):
        a, b, c, d = simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16)
        for i in range(0, whole, LANES):
            u = simd.load(f32x16, k + 4 * i)
            a, b = simd.fma(simd.load(f32x16, q0 + 4 * i), u, a), simd.fma(simd.load(f32x16, q1 + 4 * i), u, b)
            c, d = simd.fma(simd.load(f32x16, q2 + 4 * i), u, c), simd.fma(simd.load(f32x16, q3 + 4 * i), u, d)
        s0, s1, s2, s3 = simd.hsum(a), simd.hsum(b), simd.hsum(c), simd.hsum(d)
        for i in range(whole, head_dim):
            u0 = simd.load(f32, k + 4 * i)
            s0, s1 = simd.fma(simd.load(f32, q0 + 4 * i), u0, s0), simd.fma(simd.load(f32, q1 + 4 * i), u0, s1)
            s2, s3 = simd.fma(simd.load(f32, q2 + 4 * i), u0, s2), simd.fma(simd.load(f32, q3 + 4 * i), u0, s3)
        at = scores + 4 * j
        simd.store(at, s0)
        simd.store(at + stride, s1)
        simd.store(at + 2 * stride, s2)
        simd.store(at + 3 * stride, s3)
        k += k_stride
    for row in range(TILE):
        for j in range(n_keys, (n_keys + LANES - 1) & -LANES):
            simd.store(scores + row * stride + 4 * j, f32(_LOWEST))


@jit.inner
def _weights(scores, n_keys, scale):  # type: ignore[no-untyped-def]
    """Scores to weights that add up to 1, in place."""
    padded = (n_keys + LANES - 1) & -LANES
    largest = simd.splat(f32x16, f32(_LOWEST))
    for j in range(0, padded, LANES):
        largest = simd.maximum(simd.load(f32x16, scores + 4 * j), largest)
    top, total = simd.hmax(largest), simd.zero(f32x16)
    for j in range(0, padded, LANES):
        weight = simd.exp((simd.load(f32x16, scores + 4 * j) - top) * scale)
        simd.store(scores + 4 * j, weight)
        total = total + weight
    factor = f32(1) / simd.hsum(total)
    for j in range(0, padded, LANES):
        simd.store(scores + 4 * j, simd.load(f32x16, scores + 4 * j) * factor)


@jit.inner
def _values(scores, stride, v, v_stride, n_keys, head_dim, o0, o1, o2, o3):  # type: ignore[no-untyped-def]
    """Weighted sums of all values for four queries."""
    whole = head_dim & -LANES
    for i in range(0, whole, LANES):
        a, b, c, d = simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16), simd.zero(f32x16)
        at = v + 4 * i
        for j in range(n_keys):
            u, w = simd.load(f32x16, at), scores + 4 * j
            a, b = simd.fma(u, simd.load(f32, w), a), simd.fma(u, simd.load(f32, w + stride), b)
            c, d = simd.fma(u, simd.load(f32, w + 2 * stride), c), simd.fma(u, simd.load(f32, w + 3 * stride), d)
            at += v_stride
        simd.store(o0 + 4 * i, a)
        simd.store(o1 + 4 * i, b)
        simd.store(o2 + 4 * i, c)
        simd.store(o3 + 4 * i, d)
    for i in range(whole, head_dim):
        s0, s1, s2, s3 = f32(0), f32(0), f32(0), f32(0)
        at = v + 4 * i
        for j in range(n_keys):
            u0, w = simd.load(f32, at), scores + 4 * j
            s0, s1 = simd.fma(u0, simd.load(f32, w), s0), simd.fma(u0, simd.load(f32, w + stride), s1)
            s2, s3 = simd.fma(u0, simd.load(f32, w + 2 * stride), s2), simd.fma(u0, simd.load(f32, w + 3 * stride), s3)
            at += v_stride
        simd.store(o0 + 4 * i, s0)
        simd.store(o1 + 4 * i, s1)
        simd.store(o2 + 4 * i, s2)
        simd.store(o3 + 4 * i, s3)


@jit.op
def text_attention(args, tid, nth):  # type: ignore[no-untyped-def]
    """out = softmax(q · k * scale) · v over all tokens of the query's text. Tiles of queries go to the threads in turn."""
    n_heads, head_dim, scale = field(args, _N_HEADS), field(args, _HEAD_DIM), number(args, _SCALE)
    group = n_heads // field(args, _N_KV_HEADS)
    q_stride, k_stride, v_stride, out_stride = (
        field(args, _Q_STRIDE),
        field(args, _K_STRIDE),
        field(args, _V_STRIDE),
        field(args, _OUT_STRIDE),
    )
    scores = field(args, _SCRATCH) + tid * field(args, _SCRATCH_STRIDE)
    starts, unit = field(args, _STARTS), tid
    for text in range(field(field(args, _TEXTS), 0)):
        start = index(starts, text)
        length = index(starts, text + 1) - start
        stride = 4 * ((length + LANES - 1) & -LANES)
        tiles = (length + TILE - 1) // TILE
        while unit < n_heads * tiles:
            head, first = unit // tiles, unit % tiles * TILE
            # The last tile of a text takes its last query several times over, which writes the same values to the same place.
            r0, last = start + first, start + length - 1
            r1, r2, r3 = min(r0 + 1, last), min(r0 + 2, last), min(r0 + 3, last)
            q, out = field(args, _Q) + 4 * head_dim * head, field(args, _OUT) + 4 * head_dim * head
            k = field(args, _K) + start * k_stride + 4 * head_dim * (head // group)
            v = field(args, _V) + start * v_stride + 4 * head_dim * (head // group)
            _scores(
                q + r0 * q_stride, q + r1 * q_stride, q + r2 * q_stride, q + r3 * q_stride, k, k_stride, length, head_dim, scores, stride
            )
            for row in range(TILE):
                _weights(scores + row * stride, length, scale)
            _values(
                scores, stride, v, v_stride, length, head_dim, out + r0 * out_stride, out + r1 * out_stride, out + r2 * out_stride,
                out + r3 * out_stride,
            )  # fmt: skip
            unit += nth
        unit -= n_heads * tiles
