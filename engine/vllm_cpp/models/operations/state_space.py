"""Selective state spaces as operations: the mixers of the first and of the second generation, from the normed input to what goes into
their output matrix.

Owns the order of their parts, the keys and tensors that size them, and the forms their weights have in files. Must not know architectures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_cpp.kernels.cpu import state_space
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Address, Builder, Rows
from vllm_cpp.models.operations.recurrence import columns, convolution, taps_of

LANES = state_space.LANES


@dataclass(frozen=True, slots=True)
class Scan:
    """What a scan goes by: `heads` of `width` channels whose state has `state_size` numbers a channel; `groups` of them share what the
    state takes in and gives out. `a` and `d` are the layer's vectors (see kernels/cpu/state_space.py)."""

    heads: int
    width: int
    groups: int
    state_size: int
    a: Address
    d: Address


def mamba2(b: Builder, il: int, h: Rows, eps: float) -> Rows:
    """The mixer of layer `il` with one decay a head (FAMILIES-hybrid §1), to be multiplied by ssm_out. The keys ssm.* size it."""
    inner, state_size, taps = (b.keys.integer(f"ssm.{key}", least=1) for key in ("inner_size", "state_size", "conv_kernel"))
    heads, groups = b.keys.integer("ssm.time_step_rank", least=1), b.keys.integer("ssm.group_count", least=1)
    if inner % heads or heads % groups:
        b.keys.refuse(
            "ssm.inner_size",
            f"is {inner}, ssm.time_step_rank (heads) {heads} and ssm.group_count {groups}; each must divide the one before",
        )
    name, tokens = f"blk.{il}", h.count
    convolved = inner + 2 * groups * state_size
    whole = b.weight(f"{name}.ssm_in.weight", inner + convolved + heads, h.width)
    taps_ = taps_of(b, f"{name}.ssm_conv1d.weight", convolved, taps, bias=b.maybe_vector(f"{name}.ssm_conv1d.bias", convolved))
    scan = Scan(
        heads, inner // heads, groups, state_size, _numbers(b, f"{name}.ssm_a", (heads, 1), (heads,)),
        _numbers(b, f"{name}.ssm_d", (heads, 1), (heads,)),
    )  # fmt: skip
    norm_weight = _numbers(b, f"{name}.ssm_norm.weight", (groups, inner // groups), (inner,))
    z, xbc, dt = b.rows("ssm z", inner, tokens), b.rows("ssm x, b, c", convolved, tokens), b.rows("ssm dt", heads, tokens)
    dt_bias, scale, first = b.vector(f"{name}.ssm_dt.bias", heads), b.maybe_vector(f"{name}.ssm_in.scale", 1), 0
    for part, bias in ((z, 0), (xbc, 0), (dt, dt_bias)):
        b.matmul(whole.rows(first, part.width, f"{whole.name}[{part.name}]"), h, part, bias=bias, scale=scale, barrier=part is dt)
        first += part.width
    out = b.rows("ssm convolved", convolved, tokens)
    convolution(b, xbc, taps_, out, silu=True)
    bc = groups * state_size
    _scan(b, scan, state_space.scan_heads, columns(out, 0, inner), columns(out, inner, bc), columns(out, inner + bc, bc), dt, z)
    group_norm(b, z, groups, norm_weight, eps, f"{name}.ssm_norm")
    return z


def mamba(b: Builder, il: int, h: Rows, eps: float) -> Rows:
    """The mixer of layer `il` with decays for every channel (FAMILIES-hybrid §11), to be multiplied by ssm_out. The keys ssm.* size it."""
    inner, state_size, taps = (b.keys.integer(f"ssm.{key}", least=1) for key in ("inner_size", "state_size", "conv_kernel"))
    rank = b.keys.integer("ssm.time_step_rank", least=1)
    name, tokens = f"blk.{il}", h.count
    both = b.weight(f"{name}.ssm_in.weight", 2 * inner, h.width)
    of_x, of_dt = b.weight(f"{name}.ssm_x.weight", rank + 2 * state_size, inner), b.weight(f"{name}.ssm_dt.weight", inner, rank)
    taps_ = taps_of(b, f"{name}.ssm_conv1d.weight", inner, taps, bias=b.maybe_vector(f"{name}.ssm_conv1d.bias", inner))
    scan = Scan(inner, 1, 1, state_size, _growth_by_lanes(b, f"{name}.ssm_a", inner, state_size), b.vector(f"{name}.ssm_d", inner))
    x, z = b.rows("ssm x", inner, tokens), b.rows("ssm z", inner, tokens)
    scale = b.maybe_vector(f"{name}.ssm_in.scale", 1)
    b.matmul(both.rows(0, inner, f"{both.name}[x]"), h, x, scale=scale, barrier=False)
    b.matmul(both.rows(inner, inner, f"{both.name}[z]"), h, z, scale=scale)
    out = b.rows("ssm convolved", inner, tokens)
    convolution(b, x, taps_, out, silu=True)
    small = b.rows("ssm dt, b, c", rank + 2 * state_size, tokens)
    b.matmul(of_x, out, small, scale=b.maybe_vector(f"{name}.ssm_x.scale", 1))
    normed, first = {}, 0
    for part, width in (("dt", rank), ("b", state_size), ("c", state_size)):
        normed[part] = b.rows(f"ssm {part} normed", width, tokens)
        weight = b.vector(f"{name}.ssm_{part}_norm.weight", width)
        b.rmsnorm(columns(small, first, width), weight, eps, normed[part], f"{name}.ssm_{part}_norm")
        first += width
    dt = b.rows("ssm dt", inner, tokens)
    b.matmul(of_dt, normed["dt"], dt, bias=b.vector(f"{name}.ssm_dt.bias", inner), scale=b.maybe_vector(f"{name}.ssm_dt.scale", 1))
    _scan(b, scan, state_space.scan_channels, out, normed["b"], normed["c"], dt, z)
    return z


def _scan(b: Builder, scan: Scan, kernel: object, x: Rows, taken: Rows, read: Rows, dt: Rows, z: Rows) -> None:
    """z = (what the state and d make of x) * silu(z), run by run; every call keeps a state of its own."""
    step, by_channel = b.step, kernel is state_space.scan_channels
    state = b.state(state_space.state_values(1 if by_channel else scan.heads, scan.heads if by_channel else scan.width, scan.state_size))
    record = pack(
        state_space.SCAN_FIELDS, n_runs=b.count("seqs"), run_starts=step.run_starts.ctypes.data, state_ids=step.state_ids.ctypes.data,
        positions=step.positions.ctypes.data, x=x.address, x_stride=x.stride, b=taken.address, b_stride=taken.stride, c=read.address,
        c_stride=read.stride, dt=dt.address, dt_stride=dt.stride, z=z.address, z_stride=z.stride, a=scan.a, d=scan.d,
        n_heads=scan.heads, head_dim=scan.width, n_groups=scan.groups, n_state=scan.state_size, state=state.address,
        state_stride=state.stride, out=z.address, out_stride=z.stride,
    )  # fmt: skip
    b.program.add(kernel, record, f"{z.name} = scan of {x.name}, {dt.name} * silu({z.name})")
    z.quantized.clear()


def group_norm(b: Builder, x: Rows, groups: int, weight: Address, eps: float, label: str) -> None:
    """Each of `groups` equal parts of a row of x normed by itself, in place; `weight` f32[x.width]."""
    record = pack(
        state_space.GROUP_NORM_FIELDS, count=x.count, x=x.address, x_stride=x.stride, n_groups=groups, width=x.width // groups,
        weight=weight, eps=float(eps), out=x.address, out_stride=x.stride,
    )  # fmt: skip
    b.program.add(state_space.group_norm, record, f"{x.name} = {groups} rmsnorms({x.name}, {label})")
    x.quantized.clear()


def _numbers(b: Builder, name: str, *shapes: tuple[int, ...]) -> Address:
    """A float32 copy of the tensor `name` in one of these shapes, all values in a row."""
    found = b.model.tensors.get(name)
    shape = found.shape if found is not None and found.shape in shapes else shapes[0]
    return b.keep_vector(b.floats(name, shape).ravel())


def _growth_by_lanes(b: Builder, name: str, channels: int, state_size: int) -> Address:
    """`name` (channels, state_size) as f32 [channels / 16, state_size, 16]: what sixteen channels are multiplied by, in one vector."""
    rows = b.floats(name, (channels, state_size))
    whole = np.zeros((-(-channels // LANES) * LANES, state_size), np.float32)
    whole[:channels] = rows
    return b.keep_vector(whole.reshape(-1, LANES, state_size).transpose(0, 2, 1).ravel())
