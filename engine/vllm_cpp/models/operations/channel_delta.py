"""The delta rule with a decay for every key channel (KDA) as a mixer: projections, convolutions, the rule, a norm gated by a sigmoid.

Owns the names of its tensors and both forms in which files hold its gates. Must not know architectures: a family says whether decays have
a bound.
"""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import recurrent
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.operations import recurrence

_PARTS = ("q", "k", "v")


def channel_delta(b: Builder, hp: HyperParameters, il: int, h: Rows, *, bound: float = 0.0) -> Rows:
    """rmsnorm(delta rule of the convolved q, k, v) * sigmoid(gate), [tokens, heads * channels]. `bound`: of the logarithm of a decay (see
    recurrence.Decay)."""
    name = f"blk.{il}"
    shape = recurrence.delta_shape(b.keys, "attention.head_count", "attention.head_count", "kda.head_dim")
    taps = b.keys.integer("ssm.conv_kernel", least=1)
    weight = recurrence.joined_taps(b, [f"{name}.ssm_conv1d_{part}.weight" for part in _PARTS], shape.keys, taps)
    decay = recurrence.decay_of(b, f"{name}.ssm_a", f"{name}.ssm_dt.bias", shape.num_heads, shape.values, bound=bound)
    norm = b.vector(f"{name}.ssm_norm.weight", shape.width)
    fused = f"{name}.attn_qkv.weight" in b.model.tensors
    matrices = {f"{name}.attn_qkv": 3 * shape.keys} if fused else {f"{name}.attn_{part}": shape.keys for part in _PARTS}
    qkv = recurrence.side_by_side(b, h, "q, k, v", matrices, barrier=False)
    beta = recurrence.side_by_side(b, h, "beta", {f"{name}.ssm_beta": shape.num_heads}, barrier=False)
    alpha, gate = _gates(b, name, h, shape)
    convolved, out = b.rows("convolved q, k, v", qkv.width, h.count), b.rows("delta rule", shape.values, h.count)
    recurrence.convolution(b, qkv, weight, convolved, silu=True)
    q, k, v = (recurrence.columns(convolved, i * shape.keys, shape.keys, part) for i, part in enumerate(_PARTS))
    recurrence.delta_rule(b, shape, q, k, v, v, alpha=alpha, decay=decay, beta=beta, eps=hp.rms_epsilon)
    recurrence.gated_norm(b, v, shape.width, norm, hp.rms_epsilon, gate, recurrent.SIGMOID, out)
    return out


def _gates(b: Builder, name: str, h: Rows, shape: recurrence.DeltaShape) -> tuple[Rows, Rows]:
    """What decays and the output's gate are made of, a value a channel: products of h with whole matrices, or with two of low rank, one
    after the other."""
    kinds, n = ("f", "g"), shape.values
    if f"{name}.ssm_f_b.weight" not in b.model.tensors:
        both = recurrence.side_by_side(b, h, "alpha, gate", {f"{name}.ssm_{kind}_a": n for kind in kinds})
        return recurrence.columns(both, 0, n, "alpha"), recurrence.columns(both, n, n, "gate")
    rank = shape.width
    low = recurrence.side_by_side(b, h, "low-rank alpha, gate", {f"{name}.ssm_{kind}_a": rank for kind in kinds})
    parts = [recurrence.columns(low, i * rank, rank, f"low-rank {kind}") for i, kind in enumerate(kinds)]
    alpha = recurrence.side_by_side(b, parts[0], "alpha", {f"{name}.ssm_f_b": n}, barrier=False)
    return alpha, recurrence.side_by_side(b, parts[1], "gate", {f"{name}.ssm_g_b": n})
