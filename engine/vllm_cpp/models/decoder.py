"""The parts that decoder families are put together from: embedding, attention, feed-forward, experts, head.

Owns the order of operations inside each part and which optional tensors it honours. Must not know architecture names: a family says what
differs through `Traits` and by which parts it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file.hparams import HyperParameters, Rope
from vllm_cpp.kernels.cpu import rope, router
from vllm_cpp.kernels.cpu.elementwise import SILU_GATED, Activation
from vllm_cpp.models.builder import Builder, Rows, Weight
from vllm_cpp.models.operations import attention as attention_ops
from vllm_cpp.models.operations import encoder as encoder_ops
from vllm_cpp.models.operations import experts as expert_ops
from vllm_cpp.models.operations import pooling as pooling_ops

PER_HEAD, WHOLE_ROW = "per head", "whole row"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What sets a family's decoder apart."""

    rope_layout: int = rope.NEOX
    qk_norm: str | None = None  # PER_HEAD or WHOLE_ROW
    output_bias: bool = False  # attn_output.bias is honoured
    ffn_bias: bool = False  # ffn_{gate,up,down}.bias are honoured
    head_bias: bool = False  # output.bias is honoured
    tied_head: bool = True  # output.weight may be missing: the embedding is the head
    ffn_norm: str = "ffn_norm"  # the norm before the feed-forward part
    output_norm: str = "output_norm"  # the last norm
    embedding_scale: float = 1.0  # embeddings are multiplied by it
    residual_scale: float = 1.0  # so is what each part adds to the residual stream
    logit_divisor: float = 1.0  # logits are divided by it
    logit_cap: float = 0.0  # and brought softly below it (0: not)
    mixer_norm: str = ""  # the norm of what attention adds to the residual stream ("": none)
    attention_scale: float = 0.0  # attention's scores are multiplied by it; 0: by 1 / sqrt(head length)
    activation: Activation = SILU_GATED  # of dense parts and experts
    expert_scores: int | None = router.SOFTMAX  # how router logits become scores; None: expert_gating_func must say
    reads_expert_scores: bool = False  # expert_gating_func, where it is there, says otherwise
    needs_expert_bias: bool = False  # exp_probs_b.bias must be there (it is honoured where it is)
    normalize_experts: bool | None = True  # chosen experts' weights are divided by their sum; None: if expert_weights_norm says so
    scale_experts: bool = False  # expert_weights_scale is honoured
    expert_width: Callable[[HyperParameters, int], int] | None = None  # hidden units of an expert; None: feed_forward_length
    shared_width: Callable[[HyperParameters, int], int] | None = None  # of the shared expert (0: there is none); None: none anywhere
    gated_shared_expert: bool = False  # it is multiplied by a sigmoid of its own


class Mixed(NamedTuple):
    """What a mixer (attention, a recurrent layer) made of the tokens: rows, and the name of the matrix (and of its bias and scale) that
    brings them back to the residual stream, as "attn_output"."""

    rows: Rows
    output: str


# mixer(il, h): what the tokens tell each other. feed(il, h, x): x += what each token makes of itself.
Mixer = Callable[[int, Rows], Mixed]
Feed = Callable[[int, Rows, Rows], None]


def describe(
    b: Builder, hp: HyperParameters, traits: Traits, *, x: Rows | None = None, mixer: Mixer | None = None, feed: Feed | None = None
) -> None:  # fmt: skip
    """Embedding, layers, head: the frame that most families share (FAMILIES: Frame). Without `mixer` every layer has the same attention,
    and without `feed` experts where the model has any. `x`: the residual stream, where it has begun already."""
    if mixer is None:
        check_widths(b, hp)
    x = x or embedding(b, hp, traits)
    if mixer is None:
        turn = rope_of(b, hp, traits.rope_layout)

        def mixer(il: int, h: Rows) -> Mixed:
            mix = text_attention if b.pooling and not b.pooling.causal else attention
            return Mixed(mix(b, hp, traits, il, h, turn), "attn_output")

    if feed is None:

        def feed(il: int, h: Rows, x: Rows) -> None:
            feed_forward(b, hp, traits, il, h, x)

    for il in range(hp.num_layers):
        h = norm(b, hp, f"blk.{il}.attn_norm", x)
        mixed = mixer(il, h)
        if il == hp.num_layers - 1 and not b.pooling:
            # From here on only the rows whose logits are wanted matter.
            mixed, x = Mixed(only_sampled(b, mixed.rows), mixed.output), only_sampled(b, x)
        add_projected(b, hp, traits, il, mixed, x)
        h = norm(b, hp, f"blk.{il}.{traits.ffn_norm}", x)
        if traits.residual_scale == 1:
            feed(il, h, x)
        else:
            y = b.rows("feed-forward out", x.width, x.count)
            b.clear(y)
            feed(il, h, y)
            b.add(x, y, traits.residual_scale)
    head(b, hp, traits, x)


def embedding(b: Builder, hp: HyperParameters, traits: Traits) -> Rows:
    """The residual stream as it begins: the tokens' embeddings."""
    table = b.weight("token_embd.weight", hp.vocab_size, hp.embedding_length)
    x = b.rows("x", hp.embedding_length, b.count("tokens"))
    b.embed(table, x)
    if traits.embedding_scale != 1:
        b.scale(x, traits.embedding_scale)
    return x


def norm(b: Builder, hp: HyperParameters, name: str, x: Rows, out: str = "h") -> Rows:
    """rmsnorm of x by the vector of that name, in the buffer `out`."""
    h = b.rows(out, x.width, x.count)
    b.rmsnorm(x, b.vector(f"{name}.weight", x.width), hp.rms_epsilon, h, name)
    return h


def add_projected(b: Builder, hp: HyperParameters, traits: Traits, il: int, mixed: Mixed, x: Rows) -> None:
    """x += residual_scale * (output matrix · what the mixer made), normed before where the family does that."""
    name = f"blk.{il}.{mixed.output}"
    weight = b.weight(f"{name}.weight", x.width, mixed.rows.width)
    bias, scale = b.maybe_vector(f"{name}.bias", x.width) if traits.output_bias else 0, b.maybe_vector(f"{name}.scale", 1)
    if traits.residual_scale == 1 and not traits.mixer_norm:
        b.matmul(weight, mixed.rows, x, accumulate=True, bias=bias, scale=scale)
        return
    y = b.rows("mixer out", x.width, x.count)
    b.matmul(weight, mixed.rows, y, bias=bias, scale=scale)
    if traits.mixer_norm:
        norm(b, hp, f"blk.{il}.{traits.mixer_norm}", y, y.name)
    b.add(x, y, traits.residual_scale)


def feed_forward(b: Builder, hp: HyperParameters, traits: Traits, il: int, h: Rows, x: Rows) -> None:
    """x += experts, or a dense part where the layer has none."""
    if hp.num_experts and il >= hp.num_leading_dense_layers:
        experts(b, hp, traits, il, h, x)
    else:
        dense(b, il, h, x, hp.feed_forward_length[il], bias=traits.ffn_bias, activation=traits.activation)


def check_widths(b: Builder, hp: HyperParameters) -> None:
    """Hold the numbers that size activations, rope tables and KV blocks against tensors, before anything is allocated: where a key lies,
    the refusal names the tensor that says otherwise. (The other parts look at their weights first.)"""
    n = hp.embedding_length
    b.model.need("token_embd.weight", (hp.vocab_size, n))
    for il, kv in enumerate(b.kv_layouts):
        if kv is None:
            continue
        q, k, v = hp.num_heads[il] * kv.head_dim, kv.num_kv_heads * kv.head_dim, kv.num_kv_heads * kv.value_length
        if f"blk.{il}.attn_qkv.weight" in b.model.tensors:
            b.model.need(f"blk.{il}.attn_qkv.weight", (q + k + v, n))
        else:
            b.model.need(f"blk.{il}.attn_q.weight", (q, n))
            b.model.need(f"blk.{il}.attn_k.weight", (k, n))


def only_sampled(b: Builder, x: Rows) -> Rows:
    """The rows of x whose logits are wanted, in a buffer of their own."""
    out = b.rows(f"{x.name} sampled", x.width, b.count("sampled"))
    b.gather_sampled(x, out)
    return out


# -- attention
def rope_of(
    b: Builder, hp: HyperParameters, layout: int, positions: Rope | None = None, *, with_factors: bool = True,
    turned: np.ndarray | None = None, **yarn: float,
) -> attention_ops.Turn:  # fmt: skip
    """The step's cosines and sines for the layers that turn by `positions` (hp.rope, unless given). `with_factors`: rope_freqs.weight is
    honoured; `turned`: which pairs turn, where not all do; `yarn`: beta_fast, beta_slow, log_multiplier where they are not the usual ones
    (rope.rope_frequencies)."""
    positions = positions or hp.rope
    is_long = positions.scaling == "longrope"  # a factor of its own for each pair, beside the one for all that linear scaling has
    frequencies, magnitude = rope.rope_frequencies(
        positions.dimension_count, positions.freq_base, scaling="linear" if is_long else positions.scaling, factor=positions.factor,
        original_context=positions.original_context_length, attn_factor=positions.attn_factor,
        divisors=_rope_factors(b, positions) if with_factors or is_long else None, **yarn,
    )  # fmt: skip
    if turned is not None:
        frequencies = np.where(turned, frequencies, 0.0)
    return attention_ops.rope_table(b, frequencies, magnitude, layout)


def _rope_factors(b: Builder, positions: Rope) -> np.ndarray | None:
    """What each pair's angle is divided by (FAMILIES: Rope, factors); None where the file has nothing to say. Models of longrope have two
    sets: which one serves is decided by the longest sequence there is room for, not by a token's position."""
    shape = (positions.dimension_count // 2,)
    if positions.scaling == "longrope":
        is_beyond = b.step.max_blocks * b.block_size > positions.original_context_length
        info = b.model.need(f"rope_factors_{'long' if is_beyond else 'short'}.weight", shape, ("F32",))
    else:
        info = b.model.maybe("rope_freqs.weight", shape, ("F32",))
    return None if info is None else b.model.bytes_of(info.name).view("<f4")


def attention(
    b: Builder, hp: HyperParameters, traits: Traits, il: int, h: Rows, turn: attention_ops.Turn | None, **how: float
) -> Rows:  # fmt: skip
    """Projections, norms of q and k, rope, KV store, softmax(q kᵀ / sqrt(d)) v. Returns the heads side by side. `how`: window, sinks,
    temperature, temperature_context of the layer (operations.attention)."""
    kv, num_heads = b.kv_layout(il), hp.num_heads[il]
    d = kv.head_dim
    q, k, v = project(b, il, h, q=num_heads * d, k=kv.num_kv_heads * d, v=kv.num_kv_heads * kv.value_length)
    q_norm, k_norm = _qk_norms(b, hp, traits, il, q, k, d)
    attention_ops.rope_and_store(b, il, q, k, v, by=turn, q_norm=q_norm, k_norm=k_norm, eps=hp.rms_epsilon)
    width = num_heads * kv.value_length
    mixed = b.rows(f"attention {width}", width, h.count)
    attention_ops.attention(b, il, q, mixed, traits.attention_scale or d**-0.5, **how)
    return mixed


def _qk_norms(b: Builder, hp: HyperParameters, traits: Traits, il: int, q: Rows, k: Rows, d: int) -> tuple[int, int]:
    """Norms of q and k: done here, if they are of whole rows; else the weights of those of heads, or 0."""
    if traits.qk_norm == PER_HEAD:
        return b.vector(f"blk.{il}.attn_q_norm.weight", d), b.vector(f"blk.{il}.attn_k_norm.weight", d)
    if traits.qk_norm == WHOLE_ROW:
        b.rmsnorm(q, b.vector(f"blk.{il}.attn_q_norm.weight", q.width), hp.rms_epsilon, q, f"attn_q_norm of layer {il}")
        b.rmsnorm(k, b.vector(f"blk.{il}.attn_k_norm.weight", k.width), hp.rms_epsilon, k, f"attn_k_norm of layer {il}")
    return 0, 0


def text_attention(b: Builder, hp: HyperParameters, traits: Traits, il: int, h: Rows, turn: attention_ops.Turn | None) -> Rows:
    """The same where every token of a text sees every other: nothing is stored. Without `turn` positions stand elsewhere."""
    d = hp.key_length
    if hp.value_length != d:
        raise ModelLoadError(f"attention.value_length is {hp.value_length}, but attention over whole texts needs key_length, {d}")
    if hp.num_kv_heads[il] == 0:
        raise ModelLoadError(f"attention.head_count_kv is 0 in layer {il}; attention over whole texts needs one or more")
    q, k, v = project(b, il, h, q=hp.num_heads[il] * d, k=hp.num_kv_heads[il] * d, v=hp.num_kv_heads[il] * d)
    for rows, weight in zip((q, k), _qk_norms(b, hp, traits, il, q, k, d), strict=True):
        if weight:
            attention_ops.head_norm(b, rows, d, weight, hp.rms_epsilon)
        if turn is not None:
            attention_ops.turn(b, rows, d, turn)
    mixed = b.rows(f"attention {q.width}", q.width, h.count)
    encoder_ops.attention(b, q, k, v, mixed, d, traits.attention_scale or d**-0.5)
    return mixed


def near_rope(b: Builder, hp: HyperParameters, head_length: int, *, base: float, **others: object) -> Rope:
    """How positions turn in sliding layers, whose heads are `head_length` long: rope.dimension_count_swa and rope.freq_base_swa (else
    `base`) beside what holds for all layers, but for `others`."""
    turning = b.keys.integer("rope.dimension_count_swa", min(hp.rope.dimension_count, head_length), least=1)
    if turning > head_length or turning % 2:
        b.keys.refuse("rope.dimension_count_swa", f"is {turning}, expected an even number up to the head's length, {head_length}")
    return replace(hp.rope, dimension_count=turning, freq_base=b.keys.number("rope.freq_base_swa", base), **others)


def sliding_layers(b: Builder, hp: HyperParameters, period: int, *, full_first: bool = False) -> tuple[bool, ...]:
    """Which layers see a window only: attention.sliding_window_pattern says so, by flags or by a period (else `period`), of which the last
    layer sees everything, or the first."""
    key = "attention.sliding_window_pattern"
    if b.keys.kv.is_array(b.keys.prefix + key):
        return b.keys.flags(key, hp.block_count) or ()
    period = b.keys.integer(key, period, least=1)
    full = 0 if full_first else period - 1
    return tuple(il % period != full for il in range(hp.block_count))


def project(b: Builder, il: int, h: Rows, *, q: int, k: int, v: int) -> list[Rows]:
    """q, k and v of h, so many values each (0: that one is left out): three matrices, or one fused matrix with the rows of q, k, v in that
    order. Biases are honoured where the file has them; beside a fused matrix they may be one or three."""
    widths = {part: width for part, width in (("q", q), ("k", k), ("v", v)) if width}
    fused = b.model.tensors.get(f"blk.{il}.attn_qkv.weight")
    weights: dict[str, Weight] = {}
    biases: dict[str, int] = {}
    scales: dict[str, int] = {}
    if fused is None:
        for part, width in widths.items():
            name = f"blk.{il}.attn_{part}"
            weights[part] = b.weight(f"{name}.weight", width, h.width)
            biases[part] = b.maybe_vector(f"{name}.bias", width)
            scales[part] = b.maybe_vector(f"{name}.scale", 1)
    else:
        name = f"blk.{il}.attn_qkv"
        whole, bias, first = b.weight(f"{name}.weight", q + k + v, h.width), b.maybe_vector(f"{name}.bias", q + k + v), 0
        scale = b.maybe_vector(f"{name}.scale", 1)
        for part, width in widths.items():
            weights[part] = whole.rows(first, width, f"{name}.weight[{part}]")
            biases[part] = bias + 4 * first if bias else b.maybe_vector(f"blk.{il}.attn_{part}.bias", width)
            scales[part] = scale
            first += width
    # Made only now that the shapes of tensors have borne out their widths.
    rows = {part: b.rows(f"{part} {width}", width, h.count) for part, width in widths.items()}
    b.activations(h, list(weights.values()))
    for part, made in rows.items():
        b.matmul(weights[part], h, made, bias=biases[part], scale=scales[part], barrier=part == list(rows)[-1])
    return list(rows.values())


# -- feed-forward
def dense(
    b: Builder, il: int, h: Rows, x: Rows, width: int, *, suffix: str = "", bias: bool = False, out: Rows | None = None,
    activation: Activation = SILU_GATED,
) -> None:  # fmt: skip
    """x += down · activation(gate · h, up · h); into `out` instead of being added to x where that is given."""
    if width <= 0:
        raise ModelLoadError(f"feed_forward_length is missing, and layer {il} has a dense feed-forward part (ffn_up{suffix})")
    parts, biases, scales = {}, {}, {}
    for part, rows, cols in (("gate", width, h.width), ("up", width, h.width), ("down", x.width, width)):
        if part == "gate" and not activation.gated:
            continue
        name = f"blk.{il}.ffn_{part}{suffix}"
        parts[part] = b.weight(f"{name}.weight", rows, cols)
        biases[part] = b.maybe_vector(f"{name}.bias", rows) if bias else 0
        scales[part] = b.maybe_vector(f"{name}.scale", 1)
    hidden = {part: b.rows(f"{part}{suffix} {width}", width, h.count) for part in parts if part != "down"}
    b.activations(h, [parts[part] for part in hidden])
    for part, rows in hidden.items():
        b.matmul(parts[part], h, rows, bias=biases[part], scale=scales[part], barrier=part == "up")
    made = hidden.get("gate", hidden["up"])
    b.activate(hidden.get("gate"), hidden["up"], made, activation)
    b.matmul(parts["down"], made, x if out is None else out, accumulate=out is None, bias=biases["down"], scale=scales["down"])


def experts(
    b: Builder, hp: HyperParameters, traits: Traits, il: int, h: Rows, x: Rows, *, shared_activation: Activation | None = None
) -> None:  # fmt: skip
    """x += routed experts (FAMILIES: Experts), and a shared expert where the layer has one (`shared_activation`: if its is another)."""
    width = traits.expert_width(hp, il) if traits.expert_width else hp.feed_forward_length[il]
    if width <= 0:
        raise ModelLoadError(f"the experts' width of layer {il} is missing (expert_feed_forward_length or feed_forward_length)")
    routes = route(b, hp, traits, il, h)
    towers = expert_ops.towers(b, il, hp.num_experts, width, h.width, gated=traits.activation.gated)
    shared = SharedExpert(b, hp, traits, il, h, x, shared_activation)
    expert_ops.experts(b, routes, h, towers, x, activation=traits.activation, meanwhile=shared.compute)
    shared.add()


_GATING_FUNCTIONS = {1: router.SOFTMAX, 2: router.SIGMOID, 3: router.SOFTMAX_CHOSEN, 4: router.SQRT_SOFTPLUS}


def route(b: Builder, hp: HyperParameters, traits: Traits, il: int, h: Rows, table: int = 0) -> expert_ops.Routes:
    """The experts of every row of h, and their weights (FAMILIES: Experts, steps 1 to 6). `table`: see `experts_by_token`."""
    num_experts, top_k = hp.num_experts, hp.top_k[il]
    if top_k < 1:
        raise ModelLoadError(f"expert_used_count of layer {il} is 0, expected 1 to expert_count, {num_experts}")
    scores = traits.expert_scores
    if (traits.reads_expert_scores or scores is None) and hp.expert_gating_func is not None:
        scores = _GATING_FUNCTIONS[hp.expert_gating_func]
    if scores is None:
        raise ModelLoadError(f"expert_gating_func is missing, which {hp.architecture} needs: 1 (softmax), 2 (sigmoid), 3 or 4")
    logits = b.rows("router logits", num_experts, h.count)
    router_bias = b.maybe_vector(f"blk.{il}.ffn_gate_inp.bias", num_experts)
    b.matmul(b.weight(f"blk.{il}.ffn_gate_inp.weight", num_experts, h.width), h, logits, bias=router_bias)
    name = f"blk.{il}.exp_probs_b.bias"
    bias = b.vector(name, num_experts) if traits.needs_expert_bias and not table else b.maybe_vector(name, num_experts)
    return expert_ops.route(
        b, logits, top_k, scores=scores, bias=bias,
        normalize=hp.expert_weights_norm if traits.normalize_experts is None else traits.normalize_experts,
        scale=(hp.expert_weights_scale or 1.0) if traits.scale_experts else 1.0,
        groups=max(hp.num_expert_groups, 1), groups_used=hp.num_expert_groups_used, table=table,
    )  # fmt: skip


class SharedExpert:
    """The shared expert of a layer, if it has one: `compute` adds operations that need not wait for the routed ones, `add` is called after
    those. What it makes of h is added to x."""

    def __init__(
        self, b: Builder, hp: HyperParameters, traits: Traits, il: int, h: Rows, x: Rows, activation: Activation | None = None
    ):  # fmt: skip
        self._b, self._traits, self._il, self._h, self._x = b, traits, il, h, x
        self._activation = activation or traits.activation
        self._width = traits.shared_width(hp, il) if traits.shared_width else 0

    def compute(self) -> None:
        b, h = self._b, self._h
        if not self._width:
            return
        if not self._traits.gated_shared_expert:
            dense(b, self._il, h, self._x, self._width, suffix="_shexp", activation=self._activation)
            return
        y, gate = self._rows()
        dense(b, self._il, h, self._x, self._width, suffix="_shexp", activation=self._activation, out=y)
        b.matmul(b.weight(f"blk.{self._il}.ffn_gate_inp_shexp.weight", 1, h.width), h, gate)

    def add(self) -> None:
        if self._width and self._traits.gated_shared_expert:
            self._b.gated_add(self._x, *self._rows())

    def _rows(self) -> tuple[Rows, Rows]:
        return self._b.rows("shared expert", self._x.width, self._h.count), self._b.rows("shared expert gate", 1, self._h.count)


def expert_width_or_share(hp: HyperParameters, il: int) -> int:
    """expert_feed_forward_length, else feed_forward_length // top_k."""
    return hp.expert_feed_forward_length[il] or hp.feed_forward_length[il] // max(hp.top_k[il], 1)


def expert_length(hp: HyperParameters, il: int) -> int:
    """expert_feed_forward_length."""
    return hp.expert_feed_forward_length[il]


def shared_length(hp: HyperParameters, il: int) -> int:  # noqa: ARG001 - every shared_width takes both
    """expert_shared_feed_forward_length; without it there is no shared expert."""
    return hp.shared_expert_feed_forward_length


def shared_length_or_dense(hp: HyperParameters, il: int) -> int:
    """expert_shared_feed_forward_length, else feed_forward_length."""
    return hp.shared_expert_feed_forward_length or hp.feed_forward_length[il]


def shared_by_count(hp: HyperParameters, il: int) -> int:
    """As wide as expert_shared_count routed experts."""
    return expert_width_or_share(hp, il) * hp.num_shared_experts


# -- head
def head(b: Builder, hp: HyperParameters, traits: Traits, x: Rows) -> None:
    """logits = head · rmsnorm(x, output_norm) / logit_divisor, of the sampled rows; of a model that embeds, the normed rows pooled."""
    h = norm(b, hp, traits.output_norm, x)
    if b.pooling:
        pooling_ops.pool(b, h, b.pooling.kind)
        return
    if traits.logit_divisor != 1:
        b.scale(h, 1 / traits.logit_divisor)
    own = "output.weight" in b.model.tensors or not traits.tied_head
    table = b.weight("output.weight" if own else "token_embd.weight", hp.vocab_size, hp.embedding_length)
    bias = b.maybe_vector("output.bias", hp.vocab_size) if traits.head_bias else 0
    b.head(table, h, bias=bias, scale=b.maybe_vector("output.scale", 1))
    if traits.logit_cap:
        attention_ops.soft_cap(b, h.count, traits.logit_cap)
