"""Pooling as operations: the hidden states of a text's tokens become one vector of length 1, in place of logits.

Owns what a text keeps of it between steps. Must not know architectures.
"""

from __future__ import annotations

from vllm_cpp.kernels.cpu import pooling
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Builder, Rows


def pool(b: Builder, h: Rows, kind: int) -> None:
    """The end of a program that embeds: rows h of all tokens, pooled by `kind` (pooling.MEAN, CLS, LAST) for the texts that end in this
    step."""
    step, state = b.step, b.state(h.width)
    shared = {"ids": step.state_ids.ctypes.data, "state": state.address, "state_stride": state.stride, "width": h.width}
    record = pack(
        pooling.POOL_FIELDS, runs=b.count("seqs"), starts=step.run_starts.ctypes.data, positions=step.positions.ctypes.data, x=h.address,
        x_stride=h.stride, kind=kind, **shared,
    )  # fmt: skip
    b.program.add(pooling.pool, record, f"pooled += {h.name}")
    record = pack(
        pooling.POOLED_FIELDS, count=b.count("sampled"), rows=step.sampled.ctypes.data, runs_of=step.seqs.ctypes.data,
        out=b.logits.ctypes.data, out_stride=b.logits.strides[0], **shared,
    )  # fmt: skip
    b.program.add(pooling.pooled, record, "embeddings = pooled, at length 1")
    b.ends_in(record, pooling.POOLED_FIELDS)
