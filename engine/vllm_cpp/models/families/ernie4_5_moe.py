"""ernie4_5-moe: dense layers first, then experts in every n-th layer, in some models beside a shared one."""

from __future__ import annotations

from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu import rope
from vllm_cpp.models import decoder
from vllm_cpp.models.builder import Builder, Rows
from vllm_cpp.models.registry import family

TRAITS = decoder.Traits(rope_layout=rope.NEIGHBOURS, expert_width=decoder.expert_length, shared_width=decoder.shared_length)


@family("ernie4_5-moe", streams_experts=True, places_experts=True)
def ernie4_5_moe(b: Builder, hp: HyperParameters) -> None:
    step = b.keys.integer("interleave_moe_layer_step", least=1)

    def feed(il: int, h: Rows, x: Rows) -> None:
        if il >= hp.num_leading_dense_layers and (il + 1) % step == 0:
            decoder.experts(b, hp, TRAITS, il, h, x)
        else:
            decoder.dense(b, il, h, x, hp.feed_forward_length[il])

    decoder.describe(b, hp, TRAITS, feed=feed)
