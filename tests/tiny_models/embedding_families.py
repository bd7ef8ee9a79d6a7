"""The tiny models that embed: encoders, and decoders whose files declare pooling.

Owns their shapes, keys and vocabularies (WordPiece, Unigram), in a table of their own: they have no logits to be compared. What is
computed with them is in the engine's models/. Size 1 has other head counts, another pooling and other optional tensors.
"""

from __future__ import annotations

from .families import parts
from .families.parts import Build, Shape
from .model import VOCAB, TinyModel

MEAN, CLS, LAST = 1, 2, 3
NORMAL, UNKNOWN, CONTROL, UNUSED = 1, 2, 3, 5

EMBEDDERS: dict[str, tuple[str, Build]] = {}  # family -> (architecture, builder)


def embedder(name: str, arch: str) -> parts.Callable[[Build], Build]:
    def register(build: Build) -> Build:
        EMBEDDERS[name] = (arch, build)
        return build

    return register


def build(family: str, seed: int = 1, size: int = 0, dtype: str = "F32") -> TinyModel:
    """The model of a family, not yet written."""
    arch, describe = EMBEDDERS[family]
    model = TinyModel(arch, seed, dtype)
    describe(model, size)
    return model


# -- vocabularies
WORDS = [
    "the",
    "of",
    "and",
    "in",
    "to",
    "is",
    "light",
    "tower",
    "sea",
    "keeper",
    "boat",
    "winter",
    "hello",
    "world",
    "er",
    "ing",
    "ed",
    "ly",
]
SIGNS = list(".,;:!?-'\"()[]{}<>/+*=%&@#$^~|")


def word_piece(m: TinyModel) -> None:
    """Five special tokens; letters and digits that begin a word or go on with it; signs; some words."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens += [f"▁{letter}" for letter in letters] + list(letters) + [f"▁{sign}" for sign in SIGNS]
    tokens += [f"▁{word}" for word in WORDS] + [word for word in WORDS if len(word) > 1] + ["▁中", "▁文"]
    kinds = [CONTROL, UNKNOWN, CONTROL, CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 5)
    _write(m, "bert", tokens, kinds)
    m.key("tokenizer.ggml.token_type_count", 2)
    m.key("tokenizer.ggml.bos_token_id", 2)
    m.key("tokenizer.ggml.unknown_token_id", 1)
    m.key("tokenizer.ggml.seperator_token_id", 3)
    m.key("tokenizer.ggml.padding_token_id", 0)
    m.key("tokenizer.ggml.cls_token_id", 2)
    m.key("tokenizer.ggml.mask_token_id", 4)


def unigram(m: TinyModel) -> None:
    """XLM-R's order of special tokens; letters, signs and words, the longer the likelier."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", *SIGNS, *"éß中文"]
    pieces += [f"▁{word}" for word in WORDS] + WORDS + ["▁a", "▁s", "th", "▁th", "ea", "ow"]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces]
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN] + [NORMAL] * len(pieces)
    scores = [0.0] * 4 + [-9.0 + 1.25 * min(len(piece), 6) - 0.01 * i for i, piece in enumerate(pieces)]
    _write(m, "t5", tokens, kinds, scores)
    m.key("tokenizer.ggml.add_space_prefix", True)
    m.key("tokenizer.ggml.token_type_count", 1)
    m.key("tokenizer.ggml.remove_extra_whitespaces", True)
    m.key("tokenizer.ggml.bos_token_id", 0)
    m.key("tokenizer.ggml.eos_token_id", 2)
    m.key("tokenizer.ggml.unknown_token_id", 3)
    m.key("tokenizer.ggml.seperator_token_id", 2)
    m.key("tokenizer.ggml.padding_token_id", 1)
    m.key("tokenizer.ggml.add_bos_token", True)
    m.key("tokenizer.ggml.add_eos_token", True)


def _write(m: TinyModel, model: str, tokens: list[str], kinds: list[int], scores: list[float] | None = None) -> None:
    more = VOCAB - len(tokens)
    m.key("tokenizer.ggml.model", model)
    m.key("tokenizer.ggml.tokens", tokens + [f"[unused{i}]" for i in range(more)])
    if scores is not None:
        m.key("tokenizer.ggml.scores", scores + [-20.0] * more)
    m.key("tokenizer.ggml.token_type", kinds + [UNUSED] * more)


# -- encoders
def encoder_keys(m: TinyModel, s: Shape, pooling: int, eps: float, **more: object) -> None:
    m.keys(
        {
            "context_length": 256,
            "embedding_length": s.n,
            "block_count": s.layers,
            "feed_forward_length": s.ff,
            "attention.head_count": s.heads,
            "attention.layer_norm_epsilon": eps,
            "attention.causal": False,
            "pooling_type": pooling,
            **more,
        }
    )


def norm(m: TinyModel, name: str, n: int) -> None:
    m.vector(f"{name}.weight", n, mean=1.0)
    m.vector(f"{name}.bias", n)


def embeddings(m: TinyModel, n: int, kinds: int, positions: bool) -> None:
    m.weights("token_embd.weight", (VOCAB, n), 1.0)
    if kinds:
        m.weights("token_types.weight", (kinds, n), 0.5, "F32")
    if positions:
        m.weights("position_embd.weight", (256, n), 0.5, "F32")
    norm(m, "token_embd_norm", n)


def attention(m: TinyModel, b: str, s: Shape, *, fused: bool, bias: bool) -> None:
    """Loud enough that tokens look at some tokens more than at others."""
    if fused:
        m.matrix(f"{b}attn_qkv.weight", 3 * s.n, s.n, gain=1.5)
        if bias:
            m.vector(f"{b}attn_qkv.bias", 3 * s.n, std=0.3)
    else:
        for part in "qkv":
            m.matrix(f"{b}attn_{part}.weight", s.n, s.n, gain=1.5)
            if bias:
                m.vector(f"{b}attn_{part}.bias", s.n, std=0.3)
    m.matrix(f"{b}attn_output.weight", s.n, s.n, gain=1.5)
    if bias:
        m.vector(f"{b}attn_output.bias", s.n, std=0.3)
    norm(m, f"{b}attn_output_norm", s.n)


def dense(m: TinyModel, b: str, s: Shape, *, gate: bool = False, bias: bool = False) -> None:
    if gate:
        m.matrix(f"{b}ffn_gate.weight", s.ff, s.n)
    m.matrix(f"{b}ffn_up.weight", s.ff, s.n, gain=1.5)
    m.matrix(f"{b}ffn_down.weight", s.n, s.ff, gain=2.0)
    if bias:
        m.vector(f"{b}ffn_up.bias", s.ff, std=0.3)
        m.vector(f"{b}ffn_down.bias", s.n, std=0.3)


@embedder("bert", "bert")
def bert(m: TinyModel, size: int) -> None:
    """Size 1: no kinds of text, no biases in attention, heads of 24, a fused projection."""
    s = (Shape(n=256, layers=2, heads=4, kv=4, hd=64, ff=512), Shape(n=144, layers=3, heads=6, kv=6, hd=24, ff=320))[size]
    encoder_keys(m, s, (CLS, MEAN)[size], (1e-12, 1e-5)[size])
    word_piece(m)
    embeddings(m, s.n, (2, 0)[size], positions=True)
    for il in range(s.layers):
        b = f"blk.{il}."
        attention(m, b, s, fused=size == 1, bias=size == 0)
        dense(m, b, s, bias=True)
        norm(m, f"{b}layer_output_norm", s.n)


@embedder("nomic-bert", "nomic-bert")
def nomic_bert(m: TinyModel, size: int) -> None:
    s = (Shape(n=256, layers=2, heads=4, kv=4, hd=64, ff=512), Shape(n=192, layers=3, heads=4, kv=4, hd=48, ff=352))[size]
    encoder_keys(m, s, (MEAN, CLS)[size], 1e-12, **{"rope.freq_base": 1000.0})
    word_piece(m)
    embeddings(m, s.n, 2, positions=False)
    for il in range(s.layers):
        b = f"blk.{il}."
        attention(m, b, s, fused=True, bias=False)
        dense(m, b, s, gate=True)
        norm(m, f"{b}layer_output_norm", s.n)


@embedder("nomic-bert-moe", "nomic-bert-moe")
def nomic_bert_moe(m: TinyModel, size: int) -> None:
    """Experts in every second layer, or in every third."""
    s = (
        Shape(n=256, layers=4, heads=4, kv=4, hd=64, ff=256, experts=8, top_k=2),
        Shape(n=192, layers=5, heads=6, kv=6, hd=32, ff=160, experts=5, top_k=1),
    )[size]
    every = (2, 3)[size]
    encoder_keys(
        m, s, (MEAN, LAST)[size], 1e-5,
        **{"rope.freq_base": 10000.0, "moe_every_n_layers": every, "expert_count": s.experts, "expert_used_count": s.top_k},
    )  # fmt: skip
    unigram(m)
    embeddings(m, s.n, 1, positions=False)
    for il in range(s.layers):
        b = f"blk.{il}."
        attention(m, b, s, fused=True, bias=True)
        if il % every == 1:
            m.matrix(f"{b}ffn_gate_inp.weight", s.experts, s.n, gain=2.0, encoding="F32")
            m.matrix(f"{b}ffn_up_exps.weight", s.experts, s.ff, s.n, gain=1.5)
            m.matrix(f"{b}ffn_down_exps.weight", s.experts, s.n, s.ff, gain=3.0)
        else:
            dense(m, b, s, bias=True)
        norm(m, f"{b}layer_output_norm", s.n)


# -- decoders
def decoder(m: TinyModel, s: Shape, pooling: int, causal: bool | None, pre: str, *, qk_norm: bool) -> None:
    parts.common_keys(m, s, s.ff, rot=s.hd)
    m.keys({"pooling_type": pooling, "attention.causal": causal})
    m.vocabulary(pre)
    m.key("tokenizer.ggml.add_eos_token", True)
    m.weights("token_embd.weight", (VOCAB, s.n), 1.0)
    parts.norm(m, "output_norm", s.n)
    for il in range(s.layers):
        b = f"blk.{il}."
        parts.norms(m, b, s.n)
        parts.projections(m, b, s.n, s.heads * s.hd, s.kv * s.hd, s.kv * s.hd, qk_gain=1.5)
        m.matrix(f"{b}attn_output.weight", s.n, s.heads * s.hd, gain=1.5)
        if qk_norm:
            for part in "qk":
                parts.norm(m, f"{b}attn_{part}_norm", s.hd, 1.5)
        dense(m, b, s, gate=True)


@embedder("qwen3-embedding", "qwen3")
def qwen3(m: TinyModel, size: int) -> None:
    """Size 1: every token sees every other."""
    s = (Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=512), Shape(n=192, layers=3, heads=6, kv=3, hd=64, ff=416))[size]
    decoder(m, s, LAST, (None, False)[size], "qwen2", qk_norm=True)


@embedder("llama-embedding", "llama")
def llama(m: TinyModel, size: int) -> None:
    s = (Shape(n=256, layers=2, heads=4, kv=2, hd=64, ff=512), Shape(n=192, layers=2, heads=6, kv=2, hd=32, ff=352))[size]
    decoder(m, s, MEAN, (True, False)[size], "llama-bpe", qk_norm=False)
