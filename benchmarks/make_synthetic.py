"""Makes a mixture-of-experts model of random weights, a qwen3moe of about 2 GB in any encoding: something for benchmarks to read.

Owns the shape: hidden 2048, experts of 768, top-8, 32 query and 4 KV heads of 128. The model says nothing sensible, but every number is
finite and tokens choose different experts. Must not know what is measured. A tensor's weights repeat after some megabytes, at addresses of
their own; the same arguments give the same file.

    python -m benchmarks.make_synthetic Q4_K q4_k.gguf        (Q4_K means the usual mixture: Q6_K for down, v and the head)
"""

from __future__ import annotations

import argparse
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gguf_out import Plan, array, bool_, f32, text, u32, write
from tests.tiny_models.blocks import UNIT_STD, random_blocks
from vllm_cpp.gguf_file.values import FLOAT32, INT32, STRING
from vllm_cpp.quants import ENCODINGS

HIDDEN, WIDTH, TOP_K, HEADS, KV_HEADS, HEAD, VOCABULARY, CONTEXT = 2048, 768, 8, 32, 4, 128, 32000, 32768
TARGET_BYTES = 2_000_000_000
PATTERN_BYTES = 4 << 20  # of random blocks, repeated
MIXTURES = {"Q4_K": {"down": "Q6_K", "v": "Q6_K", "output": "Q6_K"}, "Q5_K": {"down": "Q6_K", "v": "Q6_K", "output": "Q6_K"}}


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs from file to file."""

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
    n_blocks = int(np.prod(shape)) // row.block_values
    seed = zlib.crc32(name.encode())

    def parts() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(seed)
        here = min(n_blocks, PATTERN_BYTES // row.block_bytes)
        pattern = blocks(encoding, here, shape[-1] ** -0.5 if std is None else std, rng)
        for done in range(0, n_blocks, here):
            yield pattern[: min(here, n_blocks - done) * row.block_bytes]

    return Plan(name, shape, row.ggml_id, n_blocks * row.block_bytes, parts)


def ones(name: str, n: int) -> Plan:
    return Plan(name, (n,), ENCODINGS["F32"].ggml_id, 4 * n, lambda: iter([np.ones(n, "<f4")]))


def tensors(encoding: str, shape: Shape) -> list[Plan]:
    """The whole model, in the order llama.cpp's converters have."""
    mixture = MIXTURES.get(encoding, {})

    def weights(part: str, name: str, *sizes: int) -> Plan:
        return random_weights(name, mixture.get(part, encoding), *sizes)

    plans = [random_weights("token_embd.weight", encoding, VOCABULARY, HIDDEN, std=1.0)]
    for il in range(shape.layers):
        at = f"blk.{il}."
        plans += [
            ones(f"{at}attn_norm.weight", HIDDEN),
            weights("q", f"{at}attn_q.weight", HEADS * HEAD, HIDDEN),
            weights("k", f"{at}attn_k.weight", KV_HEADS * HEAD, HIDDEN),
            weights("v", f"{at}attn_v.weight", KV_HEADS * HEAD, HIDDEN),
            weights("o", f"{at}attn_output.weight", HIDDEN, HEADS * HEAD),
            ones(f"{at}attn_q_norm.weight", HEAD),
            ones(f"{at}attn_k_norm.weight", HEAD),
            ones(f"{at}ffn_norm.weight", HIDDEN),
            random_weights(f"{at}ffn_gate_inp.weight", "F32", shape.experts, HIDDEN, std=2 * HIDDEN**-0.5),
            weights("gate", f"{at}ffn_gate_exps.weight", shape.experts, WIDTH, HIDDEN),
            weights("up", f"{at}ffn_up_exps.weight", shape.experts, WIDTH, HIDDEN),
            weights("down", f"{at}ffn_down_exps.weight", shape.experts, HIDDEN, WIDTH),
        ]
    return [*plans, ones("output_norm.weight", HIDDEN), weights("output", "output.weight", VOCABULARY, HIDDEN)]


def shape_for(encoding: str, target: int) -> Shape:
    """At least two layers of 128 experts, or of fewer where two are too much; as many as come nearest to the target."""
    for experts in (128, 64, 32):
        sizes = [sum(plan.n_bytes for plan in tensors(encoding, Shape(layers, experts))) for layers in (1, 2)]
        layers = max(1, round((target - 2 * sizes[0] + sizes[1]) / (sizes[1] - sizes[0])))
        if layers >= 3:
            break
    return Shape(layers, experts)


def key_values(encoding: str, shape: Shape) -> list[bytes]:
    prefix = "qwen3moe."
    pieces = [f"\N{LOWER ONE EIGHTH BLOCK}w{i}" for i in range(VOCABULARY - 259)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    return [
        text("general.architecture", "qwen3moe"),
        text("general.name", f"random {encoding}, {shape.layers} layers of {shape.experts} experts"),
        u32(f"{prefix}block_count", shape.layers),
        u32(f"{prefix}context_length", CONTEXT),
        u32(f"{prefix}embedding_length", HIDDEN),
        u32(f"{prefix}feed_forward_length", WIDTH * TOP_K),
        u32(f"{prefix}expert_feed_forward_length", WIDTH),
        u32(f"{prefix}expert_count", shape.experts),
        u32(f"{prefix}expert_used_count", TOP_K),
        u32(f"{prefix}attention.head_count", HEADS),
        u32(f"{prefix}attention.head_count_kv", KV_HEADS),
        u32(f"{prefix}attention.key_length", HEAD),
        u32(f"{prefix}attention.value_length", HEAD),
        f32(f"{prefix}attention.layer_norm_rms_epsilon", 1e-6),
        f32(f"{prefix}rope.freq_base", 1e6),
        text("tokenizer.ggml.model", "llama"),
        array("tokenizer.ggml.tokens", STRING, [struct.pack("<Q", len(raw)) + raw for raw in map(str.encode, tokens)]),
        array("tokenizer.ggml.scores", FLOAT32, [struct.pack("<f", -float(i)) for i in range(len(tokens))]),
        array("tokenizer.ggml.token_type", INT32, [struct.pack("<i", kind) for kind in kinds]),
        u32("tokenizer.ggml.bos_token_id", 1),
        u32("tokenizer.ggml.eos_token_id", 2),
        bool_("tokenizer.ggml.add_bos_token", value=False),
    ]


def make(encoding: str, out: Path, shape: Shape) -> None:
    write(out, key_values(encoding, shape), tensors(encoding, shape))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a mixture-of-experts GGUF of random weights.")
    parser.add_argument("encoding", choices=["F32", "F16", "BF16", *UNIT_STD], metavar="ENCODING")
    parser.add_argument("out", type=Path)
    parser.add_argument("--bytes", type=int, default=TARGET_BYTES, help=f"about how large (default: {TARGET_BYTES})")
    args = parser.parse_args()
    shape = shape_for(args.encoding, args.bytes)
    make(args.encoding, args.out, shape)
    print(f"{args.out}: {args.out.stat().st_size / 1e9:.2f} GB, {shape.layers} layers of {shape.experts} experts")


if __name__ == "__main__":
    main()
