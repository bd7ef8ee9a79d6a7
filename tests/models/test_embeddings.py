"""Models that embed, against llama.cpp's recorded vectors: 1e-3 of the largest value in F32, with quantized weights within 1.5 times the
distance between the oracle's own two answers (activations quantized, or kept float)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import embeddings
import vllm_cpp
from tiny_models.container import file_bytes
from tiny_models.embedding_families import build
from vllm_cpp import models
from vllm_cpp.config import offload
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.offload.resolve import REFERENCE
from vllm_cpp.errors import InvalidArgumentError, ModelLoadError
from vllm_cpp.gguf_file import open_model
from vllm_cpp.scheduler.batch import Chunk
from vllm_cpp.tokenizer import Tokenizer

NAMES = list(embeddings.cases())
CAUSAL = [name for name in NAMES if "bert" not in name and "z1" not in name]


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a recorded case's model."""
    folder = tmp_path_factory.mktemp("embedders")

    def path_of(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else embeddings.model(name).write(path)

    return path_of


@contextmanager
def runner(path: Path, residency: offload.Residency | None = None, **given: object) -> Iterator[models.Runner]:
    params = EngineParams(model_path=str(path), **{"threads": 1, "kv_cache_dtype": "f32", **given})
    with open_model(path) as model:
        loaded = models.load(model, params, residency or offload.resolve())
        try:
            yield loaded
        finally:
            loaded.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_the_recorded_one_and_its_ids_are(name: str, embedder: Callable[[str], Path]) -> None:
    model = embeddings.model(name)
    assert hashlib.sha256(file_bytes(model.kvs, model.tensors)).hexdigest() == embeddings.cases()[name]["sha256"]
    tokenizer = Tokenizer.from_gguf(embedder(name))
    assert [tokenizer.encode(text, add_special=True, parse_special=True) for text in embeddings.texts()] == embeddings.Recording(name).ids


@pytest.mark.parametrize("name", NAMES)
def test_vectors_agree_with_the_recording(name: str, embedder: Callable[[str], Path]) -> None:
    recording = embeddings.Recording(name)
    with vllm_cpp.load(embedder(name), threads=2, kv_cache_dtype="f32") as model:
        texts = [text for text, ids in zip(embeddings.texts(), recording.ids, strict=True) if ids]
        rows = model.embed(texts)
        assert model.stats()["prompt_tokens"] == sum(map(len, recording.ids))
    assert np.abs(np.linalg.norm(rows, axis=1) - 1).max() < 1e-6
    largest = np.abs(recording.values).max()
    apart = np.abs(rows - recording.values).max() / largest
    if recording.exact is None:
        assert apart < 1e-3
        return
    noise = np.abs(recording.values - recording.exact).max() / largest
    assert min(apart, np.abs(rows - recording.exact).max() / largest) <= 1.5 * noise


def blocks(ids: list[int], number: int = 0) -> list[int]:
    """KV blocks for the text of that number; there are none behind them where nothing is kept."""
    return list(range(16 * number, 16 * number - (-len(ids) // 32)))


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("mix")])
def test_the_reference_lane_is_the_exact_answer(name: str, embedder: Callable[[str], Path]) -> None:
    """Weights expanded to float32, activations as they are: what the oracle gives for decoded weights.

    Where gelu goes through f16, as ggml's table has it, a sum whose last bit differs can fall to the other side of a step, and a step is
    2**-11 of a hidden unit: two orders of the same sums differ by up to 4e-5 there, and by 1e-7 in nomic-bert, which has none.
    """
    recording = embeddings.Recording(name)
    with runner(embedder(name), residency=offload.Residency(expand=REFERENCE)) as loaded:
        rows = vectors(loaded, [ids for ids in recording.ids if ids])
    off = np.abs(rows - recording.exact).max(1) / np.abs(recording.exact).max()
    steps = name.startswith(("bert-", "nomic-bert-moe-"))
    assert np.median(off) < (1e-4 if steps else 1e-5)
    assert off.max() < (2.0**-11 if steps else 1e-5)


def vectors(loaded: models.Runner, texts: list[list[int]], cuts: tuple[int, ...] = ()) -> np.ndarray:
    """Each text alone, in runs that end at `cuts`."""
    rows = []
    for ids in texts:
        ends = [0, *(cut for cut in cuts if cut < len(ids)), len(ids)]
        for first, last in pairwise(ends):
            out = loaded.run([Chunk(ids[first:last], first, blocks(ids), last == len(ids), 1)])
        rows.append(out[0].copy())
    return np.stack(rows)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("mix")])
def test_a_text_has_the_same_bits_in_any_company_and_on_any_threads(name: str, embedder: Callable[[str], Path]) -> None:
    texts = [ids for ids in embeddings.Recording(name).ids if ids]
    with runner(embedder(name)) as loaded:
        alone = vectors(loaded, texts)
    with runner(embedder(name), threads=3, max_num_seqs=8) as loaded:
        chunks = [Chunk(ids, 0, blocks(ids, i), True, i) for i, ids in enumerate(texts)]
        assert np.array_equal(loaded.run(chunks), alone)
        assert np.array_equal(loaded.run(chunks[::-1]), alone[::-1])


@pytest.mark.parametrize("name", CAUSAL)
def test_where_a_token_sees_those_before_it_a_text_may_come_in_pieces(name: str, embedder: Callable[[str], Path]) -> None:
    texts = [ids for ids in embeddings.Recording(name).ids if ids]
    with runner(embedder(name), threads=2) as loaded:
        assert np.array_equal(vectors(loaded, texts, cuts=(1, 2, 9, 40)), vectors(loaded, texts))


@pytest.mark.parametrize("name", ["bert-s1-z0-F32", "qwen3-embedding-s1-z1-F32"])
def test_more_texts_than_a_piece_holds(name: str, embedder: Callable[[str], Path]) -> None:
    """Whole texts are never cut: the step goes on with the next piece."""
    (*_, text) = embeddings.Recording(name).ids
    with runner(embedder(name), max_num_seqs=8) as loaded:
        (alone,) = vectors(loaded, [text])
        rows = loaded.run([Chunk(text, 0, blocks(text, i), True, i) for i in range(8)])
        assert np.array_equal(rows, np.tile(alone, (8, 1)))


def test_a_text_of_the_whole_context_and_one_too_long(embedder: Callable[[str], Path]) -> None:
    with vllm_cpp.load(embedder("bert-s1-z0-F32"), threads=2) as model:
        assert model.embed("a " * 254).shape == (1, 256)
        with pytest.raises(InvalidArgumentError, match="text has 257 tokens, and max_model_len=256 leaves room for 256; shorten it"):
            model.embed("a " * 255)
        assert model.embed(["x", "the sea"]).shape == (2, 256)
    with vllm_cpp.load(embedder("bert-s1-z0-F32"), threads=1, max_model_len=16) as model, pytest.raises(InvalidArgumentError):
        model.embed("a " * 15)


@pytest.mark.parametrize("name", ["bert-s1-z0-F32", "llama-embedding-s1-z0-F32"])
def test_a_model_that_embeds_generates_nothing(name: str, embedder: Callable[[str], Path]) -> None:
    with vllm_cpp.load(embedder(name), threads=1) as model:
        for call in (lambda: model.generate("a"), lambda: model.stream("a"), lambda: model.chat([{"role": "user", "content": "a"}])):
            with pytest.raises(InvalidArgumentError, match=r"this model embeds texts and generates none .*: call embed"):
                call()
        assert model.embed("a").shape[0] == 1


def test_a_model_that_generates_embeds_nothing(tiny_model: Callable[[str], Path]) -> None:
    with vllm_cpp.load(tiny_model("llama-s1-z0-F32"), threads=1) as model, pytest.raises(InvalidArgumentError, match="does not embed"):
        model.embed("a")


def test_streamed_experts_give_the_resident_ones_bits(embedder: Callable[[str], Path]) -> None:
    path = embedder("nomic-bert-moe-s2-z0-mix")
    with vllm_cpp.load(path, threads=2) as model:
        resident = model.embed(embeddings.texts()[3:])
    # A process decides once whether it streams.
    program = (
        f"import sys, vllm_cpp; model = vllm_cpp.load({str(path)!r}, threads=2, expert_stream=4); "
        f"sys.stdout.buffer.write(model.embed({embeddings.texts()[3:]!r}).tobytes())"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    streamed = np.frombuffer(done.stdout, np.float32)
    assert b"expert" in done.stderr
    assert np.array_equal(streamed.reshape(resident.shape), resident)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        (
            "bert",
            {"pooling_type": 0},
            "'bert.pooling_type'.* is missing or 0, and bert is an encoder, which does nothing but embed: expected 1",
        ),
        ("bert", {"pooling_type": 4}, r"'bert.pooling_type'.* is 4 \(rank\): reranking models are not built in this version"),
        ("qwen3-embedding", {"pooling_type": 7}, "'qwen3.pooling_type'.* is 7; expected 1 .* or 0 for text"),
        ("bert", {"attention.causal": True}, "'bert.attention.causal'.* is true, but bert is an encoder"),
        (
            "llama-embedding",
            {"pooling_type": 0, "attention.causal": False},
            "'llama.attention.causal'.* is false, but a model without pooling",
        ),
        ("bert", {"attention.head_count_kv": 0}, "attention.head_count_kv is 0 in layer 0; attention over whole texts needs one or more"),
        ("bert", {"attention.value_length": 32}, "attention.value_length is 32, but attention over whole texts needs key_length, 64"),
        ("bert", {"context_length": 300}, r"'position_embd.weight'.*\(256, 256\).*\(300, 256\)"),
        ("nomic-bert-moe", {"moe_every_n_layers": 3}, "'blk.3.ffn_up.weight' is missing"),
        ("nomic-bert-moe", {"expert_count": 7}, "ffn_gate_inp.weight.*8.*7"),
    ],
)
def test_keys_that_contradict_are_refused(family: str, keys: dict, message: str, tmp_path: Path) -> None:
    model = build(family)
    model.keys(keys)
    with pytest.raises(ModelLoadError, match=message), vllm_cpp.load(model.write(tmp_path / "wrong.gguf"), threads=1):
        pass
