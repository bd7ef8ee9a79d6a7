"""Makes a mixture-of-experts model of random weights, of about 2 GB in any encoding: something for benchmarks to read.

Owns the shapes, one class an architecture. The model says nothing sensible, but every number is finite and tokens choose different experts.
Must not know what is measured. A tensor's weights repeat after some megabytes, at addresses of their own; the same arguments give the same
file.

    python -m benchmarks.make_synthetic Q4_K q4_k.gguf        (Q4_K means the usual mixture: Q6_K for down, v and the head)
    python -m benchmarks.make_synthetic Q4_K q4_k.gguf --architecture deepseek2
"""

from __future__ import annotations

import argparse
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gguf_out import Plan, array, bool_, f32, text, u32, write
from tests.tiny_models.blocks import UNIT_STD, random_blocks
from vllm_cpp.gguf_file.values import FLOAT32, INT32, STRING
from vllm_cpp.quants import ENCODINGS

HIDDEN, VOCABULARY, CONTEXT = 2048, 32000, 32768
TARGET_BYTES = 2_000_000_000
PATTERN_BYTES = 4 << 20  # of random blocks, repeated
MIXTURES = {"Q4_K": {"down": "Q6_K", "v": "Q6_K", "output": "Q6_K"}, "Q5_K": {"down": "Q6_K", "v": "Q6_K", "output": "Q6_K"}}
# What llama-quantize takes instead where rows do not fill blocks of 256.
SHORT_ROWS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs from file to file of an architecture."""

    layers: int
    experts: int


def blocks(encoding: str, n: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """n random blocks as bytes, whose values have about that standard deviation."""
    if encoding in ("F32", "F16", "BF16"):
        values = (rng.standard_normal(n) * std).astype(np.float32)
        narrow = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}
        return narrow[encoding].view(np.uint8)
    return random_blocks(encoding, n, std, rng).reshape(-1)


def random_weights(name: str, encoding: str, *shape: int, std: float | None = None) -> Plan:
    """A tensor of random values of the size that keeps a layer's output as large as its input."""
    row = ENCODINGS[encoding]
    num_blocks = int(np.prod(shape)) // row.block_values
    seed = zlib.crc32(name.encode())

    def parts() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(seed)
        here = min(num_blocks, PATTERN_BYTES // row.block_bytes)
        pattern = blocks(encoding, here, shape[-1] ** -0.5 if std is None else std, rng)
        for done in range(0, num_blocks, here):
            yield pattern[: min(here, num_blocks - done) * row.block_bytes]

    return Plan(name, shape, row.ggml_id, num_blocks * row.block_bytes, parts)


def constant(name: str, n: int, value: float) -> Plan:
    return Plan(name, (n,), ENCODINGS["F32"].ggml_id, 4 * n, lambda: iter([np.full(n, value, "<f4")]))


def ones(name: str, n: int) -> Plan:
    return constant(name, n, 1.0)


Weights = Callable[..., Plan]  # weights(part, name, *sizes), in the encoding that the mixture has for the part


class Qwen3Moe:
    """32 query and 4 KV heads of 128; experts of 768, top-8."""

    name, num_experts = "qwen3moe", (128, 64, 32)
    WIDTH, TOP_K, HEADS, KV_HEADS, HEAD = 768, 8, 32, 4, 128

    def layer(self, at: str, il: int, shape: Shape, weights: Weights) -> list[Plan]:  # noqa: ARG002 - all layers are alike
        return [
            ones(f"{at}attn_norm.weight", HIDDEN),
            weights("q", f"{at}attn_q.weight", self.HEADS * self.HEAD, HIDDEN),
            weights("k", f"{at}attn_k.weight", self.KV_HEADS * self.HEAD, HIDDEN),
            weights("v", f"{at}attn_v.weight", self.KV_HEADS * self.HEAD, HIDDEN),
            weights("o", f"{at}attn_output.weight", HIDDEN, self.HEADS * self.HEAD),
            ones(f"{at}attn_q_norm.weight", self.HEAD),
            ones(f"{at}attn_k_norm.weight", self.HEAD),
            ones(f"{at}ffn_norm.weight", HIDDEN),
            *experts(at, shape.experts, self.WIDTH, weights),
        ]

    def keys(self, prefix: str) -> list[bytes]:
        return [
            u32(f"{prefix}feed_forward_length", self.WIDTH * self.TOP_K),
            u32(f"{prefix}expert_feed_forward_length", self.WIDTH),
            u32(f"{prefix}expert_used_count", self.TOP_K),
            u32(f"{prefix}attention.head_count", self.HEADS),
            u32(f"{prefix}attention.head_count_kv", self.KV_HEADS),
            u32(f"{prefix}attention.key_length", self.HEAD),
            u32(f"{prefix}attention.value_length", self.HEAD),
            f32(f"{prefix}rope.freq_base", 1e6),
        ]


class Deepseek2:
    """The heads of DeepSeek-V2-Lite: 16 of 128 + 64 over a latent row of 512 + 64. Experts of 1536 (there 1408, which fills no blocks of
    256), top-6 beside two shared ones; the first layer is dense."""

    name, num_experts = "deepseek2", (64, 32)
    WIDTH, TOP_K, SHARED, DENSE, HEADS, RANK, NOPE, ROPE, VALUE = 1536, 6, 2, 10752, 16, 512, 128, 64, 128

    def layer(self, at: str, il: int, shape: Shape, weights: Weights) -> list[Plan]:
        plans = [
            ones(f"{at}attn_norm.weight", HIDDEN),
            weights("q", f"{at}attn_q.weight", self.HEADS * (self.NOPE + self.ROPE), HIDDEN),
            weights("k", f"{at}attn_kv_a_mqa.weight", self.RANK + self.ROPE, HIDDEN),
            ones(f"{at}attn_kv_a_norm.weight", self.RANK),
            weights("k", f"{at}attn_k_b.weight", self.HEADS, self.RANK, self.NOPE),
            weights("v", f"{at}attn_v_b.weight", self.HEADS, self.VALUE, self.RANK),
            weights("o", f"{at}attn_output.weight", HIDDEN, self.HEADS * self.VALUE),
            ones(f"{at}ffn_norm.weight", HIDDEN),
        ]
        if il == 0:
            return plans + gated(at, "", self.DENSE, weights)
        return plans + gated(at, "_shexp", self.SHARED * self.WIDTH, weights) + experts(at, shape.experts, self.WIDTH, weights)

    def keys(self, prefix: str) -> list[bytes]:
        return [
            u32(f"{prefix}feed_forward_length", self.DENSE),
            u32(f"{prefix}leading_dense_block_count", 1),
            u32(f"{prefix}expert_feed_forward_length", self.WIDTH),
            u32(f"{prefix}expert_used_count", self.TOP_K),
            u32(f"{prefix}expert_shared_count", self.SHARED),
            u32(f"{prefix}expert_gating_func", 1),
            f32(f"{prefix}expert_weights_scale", 1.0),
            u32(f"{prefix}attention.head_count", self.HEADS),
            u32(f"{prefix}attention.head_count_kv", 1),
            u32(f"{prefix}attention.key_length", self.RANK + self.ROPE),
            u32(f"{prefix}attention.value_length", self.RANK),
            u32(f"{prefix}attention.key_length_mla", self.NOPE + self.ROPE),
            u32(f"{prefix}attention.value_length_mla", self.VALUE),
            u32(f"{prefix}attention.q_lora_rank", 0),
            u32(f"{prefix}attention.kv_lora_rank", self.RANK),
            u32(f"{prefix}rope.dimension_count", self.ROPE),
            f32(f"{prefix}rope.freq_base", 1e4),
        ]


class Qwen35Moe:
    """The layers of Qwen3.5-35B-A3B: three of the delta rule (16 key and 32 value heads of 128) to one of gated attention (16 query and 2
    KV heads of 256, a quarter of which turns). Experts of 512, top-8 beside a shared one."""

    name, num_experts = "qwen35moe", (128, 64, 32)
    WIDTH, TOP_K, HEADS, KV_HEADS, HEAD, EVERY = 512, 8, 16, 2, 256, 4
    CHANNELS, KEY_HEADS, VALUE_HEADS, TAPS = 128, 16, 32, 4

    def layer(self, at: str, il: int, shape: Shape, weights: Weights) -> list[Plan]:
        mixer = self.attention(at, weights) if (il + 1) % self.EVERY == 0 else self.delta(at, weights)
        return [
            ones(f"{at}attn_norm.weight", HIDDEN),
            *mixer,
            ones(f"{at}post_attention_norm.weight", HIDDEN),
            *gated(at, "_shexp", self.WIDTH, weights),
            random_weights(f"{at}ffn_gate_inp_shexp.weight", "F32", HIDDEN),
            *experts(at, shape.experts, self.WIDTH, weights),
        ]

    def attention(self, at: str, weights: Weights) -> list[Plan]:
        return [
            weights("q", f"{at}attn_q.weight", 2 * self.HEADS * self.HEAD, HIDDEN),
            weights("k", f"{at}attn_k.weight", self.KV_HEADS * self.HEAD, HIDDEN),
            weights("v", f"{at}attn_v.weight", self.KV_HEADS * self.HEAD, HIDDEN),
            weights("o", f"{at}attn_output.weight", HIDDEN, self.HEADS * self.HEAD),
            ones(f"{at}attn_q_norm.weight", self.HEAD),
            ones(f"{at}attn_k_norm.weight", self.HEAD),
        ]

    def delta(self, at: str, weights: Weights) -> list[Plan]:
        keys, values = self.CHANNELS * self.KEY_HEADS, self.CHANNELS * self.VALUE_HEADS
        return [
            weights("q", f"{at}attn_qkv.weight", 2 * keys + values, HIDDEN),
            weights("q", f"{at}attn_gate.weight", values, HIDDEN),
            random_weights(f"{at}ssm_conv1d.weight", "F32", 2 * keys + values, self.TAPS),
            weights("k", f"{at}ssm_beta.weight", self.VALUE_HEADS, HIDDEN),
            weights("k", f"{at}ssm_alpha.weight", self.VALUE_HEADS, HIDDEN),
            constant(f"{at}ssm_dt.bias", self.VALUE_HEADS, 0.0),
            constant(f"{at}ssm_a", self.VALUE_HEADS, -0.1),
            ones(f"{at}ssm_norm.weight", self.CHANNELS),
            weights("o", f"{at}ssm_out.weight", HIDDEN, values),
        ]

    def keys(self, prefix: str) -> list[bytes]:
        turning = self.HEAD // 4
        sections = [11, 11, turning // 2 - 22, 0]
        return [
            u32(f"{prefix}expert_feed_forward_length", self.WIDTH),
            u32(f"{prefix}expert_shared_feed_forward_length", self.WIDTH),
            u32(f"{prefix}expert_used_count", self.TOP_K),
            u32(f"{prefix}attention.head_count", self.HEADS),
            u32(f"{prefix}attention.head_count_kv", self.KV_HEADS),
            u32(f"{prefix}attention.key_length", self.HEAD),
            u32(f"{prefix}attention.value_length", self.HEAD),
            u32(f"{prefix}full_attention_interval", self.EVERY),
            u32(f"{prefix}rope.dimension_count", turning),
            f32(f"{prefix}rope.freq_base", 1e7),
            array(f"{prefix}rope.dimension_sections", INT32, [struct.pack("<i", n) for n in sections]),
            u32(f"{prefix}ssm.conv_kernel", self.TAPS),
            u32(f"{prefix}ssm.state_size", self.CHANNELS),
            u32(f"{prefix}ssm.group_count", self.KEY_HEADS),
            u32(f"{prefix}ssm.time_step_rank", self.VALUE_HEADS),
            u32(f"{prefix}ssm.inner_size", self.CHANNELS * self.VALUE_HEADS),
        ]


ARCHITECTURES = {kind.name: kind() for kind in (Qwen3Moe, Deepseek2, Qwen35Moe)}


def experts(at: str, n: int, width: int, weights: Weights) -> list[Plan]:
    """A router and n experts."""
    return [
        random_weights(f"{at}ffn_gate_inp.weight", "F32", n, HIDDEN, std=2 * HIDDEN**-0.5),
        weights("gate", f"{at}ffn_gate_exps.weight", n, width, HIDDEN),
        weights("up", f"{at}ffn_up_exps.weight", n, width, HIDDEN),
        weights("down", f"{at}ffn_down_exps.weight", n, HIDDEN, width),
    ]


def gated(at: str, suffix: str, width: int, weights: Weights) -> list[Plan]:
    """A dense feed-forward part, or a shared expert."""
    sizes = {"gate": (width, HIDDEN), "up": (width, HIDDEN), "down": (HIDDEN, width)}
    return [weights(part, f"{at}ffn_{part}{suffix}.weight", *size) for part, size in sizes.items()]


def tensors(encoding: str, shape: Shape, architecture: str = Qwen3Moe.name) -> list[Plan]:
    """The whole model, in the order llama.cpp's converters have."""
    mixture = MIXTURES.get(encoding, {})

    def weights(part: str, name: str, *sizes: int) -> Plan:
        wanted = mixture.get(part, encoding)
        fits = sizes[-1] % ENCODINGS[wanted].block_values == 0
        return random_weights(name, wanted if fits else SHORT_ROWS.get(wanted, "Q8_0"), *sizes)

    plans = [random_weights("token_embd.weight", encoding, VOCABULARY, HIDDEN, std=1.0)]
    for il in range(shape.layers):
        plans += ARCHITECTURES[architecture].layer(f"blk.{il}.", il, shape, weights)
    return [*plans, ones("output_norm.weight", HIDDEN), weights("output", "output.weight", VOCABULARY, HIDDEN)]


def shape_for(encoding: str, target: int, architecture: str = Qwen3Moe.name, num_experts: int = 0) -> Shape:
    """At least three layers of an architecture's number of experts, or of fewer where they are too much; as many as come nearest to
    the target. `num_experts`: so many, with however few layers."""

    def size(layers: int, experts: int) -> int:
        return sum(plan.n_bytes for plan in tensors(encoding, Shape(layers, experts), architecture))

    for experts in (num_experts,) if num_experts else ARCHITECTURES[architecture].num_experts:
        sizes = {layers: size(layers, experts) for layers in (2, 3)}
        layers = max(1, round(2 + (target - sizes[2]) / (sizes[3] - sizes[2])))
        if layers >= 3:
            break
    return Shape(layers, experts)


def key_values(encoding: str, shape: Shape, architecture: str = Qwen3Moe.name) -> list[bytes]:
    prefix = f"{architecture}."
    pieces = [f"\N{LOWER ONE EIGHTH BLOCK}w{i}" for i in range(VOCABULARY - 259)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    return [
        text("general.architecture", architecture),
        text("general.name", f"random {encoding}, {shape.layers} layers of {shape.experts} experts"),
        u32(f"{prefix}block_count", shape.layers),
        u32(f"{prefix}context_length", CONTEXT),
        u32(f"{prefix}embedding_length", HIDDEN),
        u32(f"{prefix}expert_count", shape.experts),
        f32(f"{prefix}attention.layer_norm_rms_epsilon", 1e-6),
        *ARCHITECTURES[architecture].keys(prefix),
        text("tokenizer.ggml.model", "llama"),
        array("tokenizer.ggml.tokens", STRING, [struct.pack("<Q", len(raw)) + raw for raw in map(str.encode, tokens)]),
        array("tokenizer.ggml.scores", FLOAT32, [struct.pack("<f", -float(i)) for i in range(len(tokens))]),
        array("tokenizer.ggml.token_type", INT32, [struct.pack("<i", kind) for kind in kinds]),
        u32("tokenizer.ggml.bos_token_id", 1),
        u32("tokenizer.ggml.eos_token_id", 2),
        bool_("tokenizer.ggml.add_bos_token", value=False),
    ]


def make(encoding: str, out: Path, shape: Shape, architecture: str = Qwen3Moe.name) -> None:
    write(out, key_values(encoding, shape, architecture), tensors(encoding, shape, architecture))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a mixture-of-experts GGUF of random weights.")
    parser.add_argument("encoding", choices=["F32", "F16", "BF16", *UNIT_STD], metavar="ENCODING")
    parser.add_argument("out", type=Path)
    parser.add_argument("--architecture", choices=list(ARCHITECTURES), default=Qwen3Moe.name)
    parser.add_argument("--bytes", type=int, default=TARGET_BYTES, help=f"about how large (default: {TARGET_BYTES})")
    parser.add_argument("--experts", type=int, default=0, metavar="N", help="of a layer (default: up to 128, for three layers or more)")
    args = parser.parse_args()
    shape = shape_for(args.encoding, args.bytes, args.architecture, args.experts)
    make(args.encoding, args.out, shape, args.architecture)
    print(f"{args.out}: {args.out.stat().st_size / 1e9:.2f} GB, {shape.layers} layers of {shape.experts} experts")


if __name__ == "__main__":
    main()
