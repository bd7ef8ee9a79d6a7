"""bert, nomic-bert and nomic-bert-moe: encoders, which do nothing but embed. Norms stand behind each part, around the mean and with a bias.

bert learned a vector for every position; the others turn queries and keys. nomic-bert's feed-forward part is gated by silu, the others'
have a gelu and no gate; of nomic-bert-moe's layers every n-th has experts, from the second on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import rope, router
from vllm_cpp.kernels.cpu.elementwise import GELU_ALONE, SILU_GATED, Activation
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.operations import encoder
from vllm_cpp.models.operations import experts as expert_ops
from vllm_cpp.models.operations import pooling as pooling_ops
from vllm_cpp.models.registry import family

_GELU = Activation(GELU_ALONE)
_ATTENTION = decoder.Traits()


@dataclass(frozen=True, kw_only=True)
class _Traits:
    learned_positions: bool = False  # else rope
    activation: Activation = _GELU
    expert_layers: bool = False  # every n-th, by moe_every_n_layers


@family("bert", encodes=True)
def bert(b: Builder, hp: HyperParameters) -> None:
    _describe(b, hp, _Traits(learned_positions=True))


@family("nomic-bert", encodes=True)
def nomic_bert(b: Builder, hp: HyperParameters) -> None:
    _describe(b, hp, _Traits(activation=SILU_GATED))


@family("nomic-bert-moe", encodes=True, streams_experts=True, places_experts=True)
def nomic_bert_moe(b: Builder, hp: HyperParameters) -> None:
    _describe(b, hp, _Traits(expert_layers=True))


def _describe(b: Builder, hp: HyperParameters, traits: _Traits) -> None:
    n, eps = hp.embedding_length, b.keys.number("attention.layer_norm_epsilon")
    expert_period = b.keys.integer("moe_every_n_layers", 0) if traits.expert_layers else 0
    x = _embedding(b, hp, traits)
    _norm(b, x, "token_embd_norm", eps)
    turn = None if traits.learned_positions else decoder.rope_of(b, hp, rope.NEOX)
    for il in range(hp.num_layers):
        block = f"blk.{il}."
        mixed = decoder.text_attention(b, hp, _ATTENTION, il, x, turn)
        name = f"{block}attn_output"
        b.matmul(b.weight(f"{name}.weight", n, mixed.width), mixed, x, accumulate=True, bias=b.maybe_vector(f"{name}.bias", n))
        _norm(b, x, f"{block}attn_output_norm", eps)
        if expert_period and il % expert_period == 1:
            _experts(b, hp, traits, il, x)
        else:
            decoder.dense(b, il, x, x, hp.feed_forward_length[il], bias=True, activation=traits.activation)
        _norm(b, x, f"{block}layer_output_norm", eps)
    assert b.pooling is not None
    pooling_ops.pool(b, x, b.pooling.kind)


def _embedding(b: Builder, hp: HyperParameters, traits: _Traits) -> Rows:
    """Of the token, of the first kind of text (there may be a second one, for pairs of texts) and of the position."""
    n, x = hp.embedding_length, b.rows("x", hp.embedding_length, b.count("tokens"))
    b.embed(b.weight("token_embd.weight", hp.vocab_size, n), x)
    kinds = b.model.kv.get_u32("tokenizer.ggml.token_type_count", 0)
    if "token_types.weight" in b.model.tensors:
        part = b.rows("token type", n, x.count)
        b.embed(b.weight("token_types.weight", kinds, n), part, of=b.zeros(b.step.max_tokens, np.int32).ctypes.data)
        b.add(x, part)
    if traits.learned_positions:
        part = b.rows("position", n, x.count)
        b.embed(b.weight("position_embd.weight", hp.context_length, n), part, of=b.step.positions.ctypes.data)
        b.add(x, part)
    return x


def _norm(b: Builder, x: Rows, name: str, eps: float) -> None:
    encoder.layernorm(b, x, b.vector(f"{name}.weight", x.width), b.vector(f"{name}.bias", x.width), eps, name)


def _experts(b: Builder, hp: HyperParameters, traits: _Traits, il: int, x: Rows) -> None:
    """x += the chosen experts' weighted sum, the weights as the softmax over all experts has them."""
    n, num_experts = hp.embedding_length, hp.num_experts
    logits = b.rows("router logits", num_experts, x.count)
    b.matmul(b.weight(f"blk.{il}.ffn_gate_inp.weight", num_experts, n), x, logits)
    routes = expert_ops.route(b, logits, hp.top_k[il], scores=router.SOFTMAX, normalize=False, scale=hp.expert_weights_scale or 1.0)
    towers = expert_ops.towers(b, il, num_experts, hp.feed_forward_length[il], n, gated=traits.activation.gated)
    expert_ops.experts(b, routes, x, towers, x, activation=traits.activation)
