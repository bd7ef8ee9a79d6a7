"""Four residual streams as operations: begun from the embedding, read before a half-layer, written after it.

Owns the buffers between reading and writing. Must not know what a half-layer computes (FAMILIES: deepseek4, Four residual streams).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_cpp.kernels.cpu import streams
from vllm_cpp.kernels.cpu.streams import COEFFICIENTS, STREAMS
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Builder, Rows, Weight


@dataclass(frozen=True, slots=True)
class Mixing:
    """How streams are mixed: Sinkhorn iterations, what is added to coefficients and sums, and the epsilon of the norm before."""

    iterations: int
    epsilon: float
    norm_epsilon: float


def begin(b: Builder, table: Weight) -> Rows:
    """[tokens, STREAMS * n]: every stream starts as the tokens' embeddings."""
    n = table.k
    x = b.rows("streams", STREAMS * n, b.count("tokens"))
    for s in range(STREAMS):
        b.embed(table, Rows(f"stream {s}", x.array[:, s * n : (s + 1) * n], x.count))
    return x


def read(b: Builder, x: Rows, name: str, mixing: Mixing, *, writes: bool = True) -> tuple[Rows, Rows]:
    """What a half-layer reads of the streams, [rows of x, n] before its norm, and the coefficients for `write`. `name` is what the tensors'
    names begin with (blk.0.hc_attn). `writes`: False where nothing is written back, at the end."""
    n, num_mix = x.width // STREAMS, COEFFICIENTS if writes else STREAMS
    normed = b.rows("normed streams", x.width, x.count)
    b.rmsnorm(x, 0, mixing.norm_epsilon, normed, "no weight")
    mix = b.rows(f"{num_mix} coefficients", num_mix, x.count)
    b.matmul(b.weight(f"{name}_fn.weight", num_mix, x.width), normed, mix)
    out = b.rows("read of streams", n, x.count)
    record = pack(
        streams.READ_FIELDS, count=x.count, mix=mix.address, mix_stride=mix.stride,
        scale=b.vector(f"{name}_scale.weight", 3 if writes else 1),
        base=b.vector(f"{name}_base.weight", num_mix), epsilon=mixing.epsilon, iterations=mixing.iterations if writes else 0,
        x=x.address, x_stride=x.stride, width=n, out=out.address, out_stride=out.stride,
    )  # fmt: skip
    b.program.add(streams.read_streams, record, f"{out.name} = {x.name} by {name}")
    return out, mix


def write(b: Builder, x: Rows, mix: Rows, y: Rows) -> None:
    """Every stream becomes its share of y and of the old streams."""
    record = pack(
        streams.WRITE_FIELDS, count=x.count, mix=mix.address, mix_stride=mix.stride, x=x.address, x_stride=x.stride,
        width=x.width // STREAMS, y=y.address, y_stride=y.stride,
    )  # fmt: skip
    b.program.add(streams.write_streams, record, f"{x.name} = {x.name} and {y.name}, mixed")
    x.quantized.clear()
