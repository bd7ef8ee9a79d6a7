"""Recurrent mixers as operations: the causal convolution, the delta rule and the norm behind it.

Owns what a sequence keeps of one between steps, and the forms its weights have in files. Must not know architectures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_cpp.gguf_file.hparams import Keys
from vllm_cpp.kernels.cpu import rearrange, recurrent
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Address, Builder, Rows


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


def side_by_side(b: Builder, h: Rows, name: str, named: dict[str, int], *, barrier: bool = True) -> Rows:
    """The products of h with the matrices of those names (without ".weight"), of so many rows each, side by side in the buffer `name`.
    `barrier`: whether what comes next reads them."""
    weights = {matrix: b.weight(f"{matrix}.weight", num_rows, h.width) for matrix, num_rows in named.items()}
    out = b.rows(name, sum(named.values()), h.count)
    b.activations(h, list(weights.values()))
    first = 0
    for matrix, num_rows in named.items():
        part = columns(out, first, num_rows)
        first += num_rows
        b.matmul(weights[matrix], h, part, scale=b.maybe_vector(f"{matrix}.scale", 1), barrier=barrier and first == out.width)
    return out


def taps_of(b: Builder, name: str, channels: int, taps: int, *, bias: Address = 0) -> Taps:
    """The convolution weight `name`: (channels, taps), or with ones between and before them as some files have it."""
    return joined_taps(b, [name], channels, taps, bias=bias)


def joined_taps(b: Builder, names: list[str], channels: int, taps: int, *, bias: Address = 0) -> Taps:
    """The same of several weights, each of so many channels, side by side."""
    parts = []
    for name in names:
        found = b.model.tensors.get(name)
        with_one = found is not None and found.shape[-3:] == (channels, 1, taps)
        parts.append(b.floats(name, (channels, 1, taps) if with_one else (channels, taps)).reshape(channels, taps))
    width = channels * len(names)
    kept = b.zeros((taps, -(-width // 16) * 16), np.float32)
    kept[:, :width] = np.concatenate(parts).T
    return Taps(" ".join(names), kept.ctypes.data, kept.strides[0], width, taps, bias)


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


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The heads of a delta rule, all of `width` channels. `grouped`: neighbouring value heads share a key head; else value head j has key
    head j % num_key_heads."""

    num_key_heads: int
    num_heads: int
    width: int
    grouped: bool = False

    @property
    def keys(self) -> int:
        """Values of a token's keys, and of its queries."""
        return self.num_key_heads * self.width

    @property
    def values(self) -> int:
        return self.num_heads * self.width


def delta_shape(keys: Keys, key_heads: str, heads: str, width: str, *, grouped: bool = False) -> DeltaShape:
    """The heads as the keys of those names give them."""
    shape = DeltaShape(*(keys.integer(key, least=1) for key in (key_heads, heads, width)), grouped)
    if shape.num_heads % shape.num_key_heads:
        keys.refuse(heads, f"is {shape.num_heads}, expected a multiple of {key_heads}, {shape.num_key_heads}")
    if shape.width % recurrent.LANES:
        keys.refuse(width, f"is {shape.width}; this build computes the delta rule for multiples of {recurrent.LANES}")
    return shape


@dataclass(frozen=True, slots=True)
class Decay:
    """How much of the state is kept: exp(rate * softplus(x + shift)), or exp(bound * sigmoid(rate * (x + shift))) where there is a bound.
    One a value head, or one for each of its key channels."""

    rate: Address  # f32, as many as shift
    shift: Address
    n: int
    bound: float = 0.0


def decay_of(b: Builder, rate: str, shift: str, num_heads: int, n: int, *, bound: float = 0.0) -> Decay:
    """The vectors of those names: `num_heads` rates, however many ones stand in their shape, and `n` shifts (heads, or heads times
    channels)."""
    b.model.need(shift, (n,))
    found = b.model.tensors.get(rate)
    behind = found is not None and found.shape[-2:] == (num_heads, 1)
    rates = b.floats(rate, (num_heads, 1) if behind else (num_heads,)).ravel()
    return Decay(b.keep_vector(np.repeat(rates, n // num_heads)), b.vector(shift, n), n, bound)


def delta_rule(
    b: Builder, shape: DeltaShape, q: Rows, k: Rows, v: Rows, out: Rows, *, alpha: Rows, decay: Decay, beta: Rows, eps: float
) -> None:
    """out = the delta rule with l2-normed q and k, decays of alpha, and sigmoid(beta). Alpha and beta are overwritten; `out` may be v."""
    step, tokens = b.step, q.count
    if (q.width, k.width, v.width, out.width) != (shape.keys, shape.keys, shape.values, shape.values):
        raise ValueError(f"{shape}, but q, k, v and out have {q.width}, {k.width}, {v.width} and {out.width} values")
    if (alpha.width, beta.width) != (decay.n, shape.num_heads) or decay.n not in (shape.num_heads, shape.values):
        raise ValueError(f"{shape}, but alpha and beta have {alpha.width} and {beta.width} values, the decay {decay.n}")
    state = b.state(recurrent.delta_state_values(shape.num_heads, shape.width))
    heads = b.shared("delta heads", (shape.num_key_heads, step.max_tokens, recurrent.head_row_bytes(shape.width) // 4), np.float32)
    normed = pack(
        recurrent.DELTA_HEADS_FIELDS, count=tokens, q=q.address, q_stride=q.stride, k=k.address, k_stride=k.stride,
        n_heads=shape.num_key_heads, width=shape.width, eps=float(eps), scale=shape.width**-0.5, heads=heads.ctypes.data,
        head_bytes=heads.strides[0],
    )  # fmt: skip
    gates = pack(
        recurrent.DELTA_GATES_FIELDS, count=tokens, alpha=alpha.address, alpha_stride=alpha.stride, n_decays=decay.n, rate=decay.rate,
        shift=decay.shift, bound=float(decay.bound), beta=beta.address, beta_stride=beta.stride, n_betas=shape.num_heads,
    )  # fmt: skip
    record = pack(
        recurrent.DELTA_RULE_FIELDS, n_runs=b.count("seqs"), run_starts=step.run_starts.ctypes.data,
        positions=step.positions.ctypes.data, state_ids=step.state_ids.ctypes.data, heads=heads.ctypes.data, head_bytes=heads.strides[0],
        n_key_heads=shape.num_key_heads, n_heads=shape.num_heads, width=shape.width, grouped=shape.grouped, decay=alpha.address,
        decay_stride=alpha.stride, per_channel=decay.n != shape.num_heads, beta=beta.address, beta_stride=beta.stride, v=v.address,
        v_stride=v.stride, out=out.address, out_stride=out.stride, state=state.address, state_stride=state.stride,
    )  # fmt: skip
    b.program.add(recurrent.delta_heads, normed, f"norm the heads of {q.name}, {k.name}", barrier=False)
    b.program.add(recurrent.delta_gates, gates, f"decays of {alpha.name}, sigmoid({beta.name})")
    b.program.add(recurrent.delta_rule, record, f"{out.name} = delta rule of {q.name}, {k.name}, {v.name}")
    for changed in (alpha, beta, out):
        changed.quantized.clear()


def gated_norm(b: Builder, x: Rows, width: int, weight: Address, eps: float, gate: Rows, activation: int, out: Rows) -> None:
    """out = rmsnorm of each head (`width` values) of x, times `weight`, times silu or sigmoid (recurrent.SILU, SIGMOID) of the gate."""
    record = pack(
        recurrent.GATED_NORM_FIELDS, count=x.count, x=x.address, x_stride=x.stride, n_heads=x.width // width, width=width, weight=weight,
        eps=float(eps), gate=gate.address, gate_stride=gate.stride, activation=activation, out=out.address, out_stride=out.stride,
    )  # fmt: skip
    name = "sigmoid" if activation == recurrent.SIGMOID else "silu"
    b.program.add(recurrent.gated_norm, record, f"{out.name} = rmsnorm({x.name}) * {name}({gate.name})")
    out.quantized.clear()


def rearranged(b: Builder, x: Rows, out: Rows, width: int, source: list[int]) -> None:
    """out = the blocks (of `width` values) of x whose numbers are given, in that order."""
    if out.width != width * len(source) or x.width < width * (max(source) + 1):
        raise ValueError(f"{len(source)} blocks of {width} for {out.name} of {out.width} values, from {x.name} of {x.width}")
    table = b.zeros(len(source), np.int32)
    table[:] = source
    record = pack(
        rearrange.REARRANGE_FIELDS, count=x.count, x=x.address, x_stride=x.stride, out=out.address, out_stride=out.stride, width=width,
        source=table.ctypes.data, n_blocks=len(source),
    )  # fmt: skip
    b.program.add(rearrange.rearrange, record, f"{out.name} = {x.name} in another order")
    out.quantized.clear()
