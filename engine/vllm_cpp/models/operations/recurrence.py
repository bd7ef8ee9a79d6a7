"""Recurrent mixers as operations: the causal convolution.

Owns what a sequence keeps of one between steps, and the forms its weights have in files. Must not know architectures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_cpp.kernels.cpu import recurrent
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Address, Builder, Rows, as_float32


@dataclass(frozen=True, slots=True)
class Taps:
    """The weights of a causal depthwise convolution, f32 [taps, channels]: the last tap meets the current token."""

    name: str
    address: Address
    stride: int  # bytes between two taps
    channels: int
    taps: int
    bias: Address  # 0: none


def columns(x: Rows, first: int, n: int, name: str = "") -> Rows:
    """Columns first … first + n - 1 of a buffer, as rows of their own: the parts of a fused projection."""
    return Rows(name or f"{x.name}[{first}:{first + n}]", x.array[:, first : first + n], x.count)


def taps_of(b: Builder, name: str, channels: int, taps: int, *, bias: Address = 0) -> Taps:
    """The convolution weight `name`: (channels, taps), or with ones between and before them as some files have it."""
    found = b.model.tensors.get(name)
    with_one = found is not None and found.shape[-3:] == (channels, 1, taps)
    info = b.model.need(name, (channels, 1, taps) if with_one else (channels, taps), ("F32", "F16", "BF16"))
    values = as_float32(b.model.bytes_of(name), info.encoding.name).reshape(channels, taps)
    turned = b.zeros((taps, -(-channels // 16) * 16), np.float32)
    turned[:, :channels] = values.T
    return Taps(name, turned.ctypes.data, turned.strides[0], channels, taps, bias)


def convolution(
    b: Builder, x: Rows, weight: Taps, out: Rows, *, silu: bool, times: Rows | None = None, gate: Rows | None = None, barrier: bool = True
) -> None:
    """out = gate * silu(bias + convolution of x * times over the tokens of each sequence); what is not given is left out. Every call
    keeps a state of its own. `out` must not be x, times or gate."""
    step = b.step
    row = -(-weight.channels // 16) * 16
    state = b.state((weight.taps - 1) * row)
    record = pack(
        recurrent.CONVOLUTION_FIELDS, n_runs=b.count("seqs"), run_starts=step.run_starts.ctypes.data,
        positions=step.positions.ctypes.data, state_ids=step.state_ids.ctypes.data, x=x.address, x_stride=x.stride,
        times=times.address if times else 0, times_stride=times.stride if times else 0, channels=weight.channels, taps=weight.taps,
        weight=weight.address, weight_stride=weight.stride, bias=weight.bias, activate=silu,
        gate=gate.address if gate else 0, gate_stride=gate.stride if gate else 0, out=out.address, out_stride=out.stride,
        state=state.address, state_stride=state.stride, state_row=4 * row,
    )  # fmt: skip
    assert x.width == out.width == weight.channels
    b.program.add(recurrent.convolution, record, f"{out.name} = convolution({x.name}, {weight.name})", barrier)
    out.quantized.clear()
