"""Requests to embed: in any company, in pieces or whole, refused by name, and never left waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fakes import FakeRunner, FakeTokenizer, engine_params
from fakes.embedding import DIM, FakeEmbedder, vector
from vllm_cpp import SamplingParams, api
from vllm_cpp.core import Engine
from vllm_cpp.errors import GenerationError, InvalidArgumentError
from vllm_cpp.openai import chat

TEXTS = ["a", "b" * 40, "", "c d" * 20, "b" * 40]


def engine(runner: FakeRunner | None = None, **params: Any) -> Engine:
    return Engine(runner or FakeEmbedder(), FakeTokenizer(add_bos=True), engine_params(**params))


@pytest.fixture
def embedder() -> Iterator[Engine]:
    with engine() as made:
        yield made


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 64, None])
def test_texts_are_embedded_together(whole: bool, max_num_batched_tokens: int | None) -> None:
    """Whole texts never come in pieces, however few tokens a step has; others do."""
    runner = FakeEmbedder(whole_texts=whole, max_model_len=100)
    with engine(runner, max_num_batched_tokens=max_num_batched_tokens or 0, max_num_seqs=3) as made:
        requests = [made.submit_embedding(text) for text in TEXTS]
        for text, request in zip(TEXTS, requests, strict=True):
            embedding = request.wait()
            tokens = made.tokenizer.encode(text, add_special=True)
            assert np.array_equal(embedding.values, vector(tokens))
            assert embedding.prompt_tokens == len(tokens)
        stats = made.stats()
    assert stats["requests_finished"]["stop"] == len(TEXTS)
    assert stats["prompt_tokens"] == sum(len(text) + 1 for text in TEXTS)
    assert stats["kv_blocks_used"] == stats["generated_tokens"] == stats["prefix_cache_hit_tokens"] == 0
    if max_num_batched_tokens == 16:
        assert any(chunk.start for batch in runner.batches for chunk in batch) is not whole


def test_a_text_may_fill_the_context_and_no_more(embedder: Engine) -> None:
    assert embedder.submit_embedding("x" * 511).wait().prompt_tokens == 512
    with pytest.raises(InvalidArgumentError, match="text has 513 tokens, and max_model_len=512 leaves room for 512; shorten it"):
        embedder.submit_embedding("x" * 512)
    with pytest.raises(InvalidArgumentError, match="text has 2049 characters"):
        embedder.submit_embedding("x" * 2049)


def test_tokens_are_taken_as_they_are(embedder: Engine) -> None:
    assert np.array_equal(embedder.submit_embedding([1, 2]).wait().values, vector([1, 2]))
    with pytest.raises(InvalidArgumentError, match=r"text\[1\] is token id 999"):
        embedder.submit_embedding([1, 999])
    with pytest.raises(InvalidArgumentError, match="text holds no tokens"):
        embedder.submit_embedding([])
    with pytest.raises(InvalidArgumentError, match="text must be a string or a sequence of token ids, not NoneType"):
        embedder.submit_embedding(None)


def test_a_tokenizer_without_a_longest_token_takes_any_text() -> None:
    class Merging(FakeTokenizer):
        longest_token_chars = None

        def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
            return super().encode(text.replace(" ", ""), add_special, parse_special)

    with Engine(FakeEmbedder(), Merging(), engine_params()) as made:
        assert made.submit_embedding("a" + " " * 100_000).wait().prompt_tokens == 1


def test_the_two_kinds_refuse_each_other(embedder: Engine) -> None:
    refusal = "this model embeds texts and generates none .*: call embed, vllm_embed in C"
    with pytest.raises(InvalidArgumentError, match=refusal):
        embedder.submit("a", SamplingParams())
    with pytest.raises(InvalidArgumentError, match=refusal):
        chat.complete(embedder, "no JSON at all")
    with (
        engine(FakeRunner()) as generator,
        pytest.raises(InvalidArgumentError, match=r"does not embed .*: call generate or chat, vllm_comp"),
    ):
        generator.submit_embedding("a")
    assert embedder.submit_embedding("a").wait().values is not None


def test_a_request_cut_short_fails_by_name() -> None:
    running, go_on = threading.Event(), threading.Event()
    runner = FakeEmbedder()

    def before_run(_: object) -> None:
        running.set()
        go_on.wait(10)

    runner.before_run = before_run
    made = engine(runner, max_num_seqs=1)
    first, second = made.submit_embedding("a"), made.submit_embedding("b")
    running.wait(10)
    second.cancel()
    go_on.set()
    assert first.wait().values is not None
    with pytest.raises(GenerationError, match="cancelled, or the engine closed, before the text was embedded"):
        second.wait(10)
    made.close()
    with pytest.raises(GenerationError, match="the engine is closed"):
        made.submit_embedding("a")


def test_a_step_that_fails_fails_its_texts_only(embedder: Engine) -> None:
    def before_run(_: object) -> None:
        raise ValueError("broken")

    runner = embedder._runner
    runner.before_run, before = before_run, runner.before_run
    with pytest.raises(GenerationError, match="the model step failed: ValueError: broken"):
        embedder.submit_embedding("a").wait()
    runner.before_run = before
    assert embedder.submit_embedding("a").wait().values is not None


class TestDoor:
    @pytest.fixture
    def llm(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[api.LLM]:
        monkeypatch.setattr(api, "build_engine", lambda params, _: Engine(FakeEmbedder(), FakeTokenizer(), params))
        with api.load("fake.gguf") as model:
            yield model

    def test_rows_come_in_the_order_of_the_texts(self, llm: api.LLM) -> None:
        rows = llm.embed(["ab", [1, 2], "ab"])
        assert (rows.shape, rows.dtype) == ((3, DIM), np.float32)
        assert np.array_equal(rows[0], vector(list(b"ab")))
        assert np.array_equal(rows[1], vector([1, 2]))
        assert np.array_equal(rows[2], rows[0])

    def test_one_text_is_one_row(self, llm: api.LLM) -> None:
        assert np.array_equal(llm.embed("ab"), llm.embed(["ab"]))
        assert llm.embed([1, 2]).shape == (1, DIM)

    @pytest.mark.parametrize("texts", [[], [None], 3, ["a", "x" * 600]])
    def test_wrong_texts_are_refused(self, llm: api.LLM, texts: Any) -> None:
        with pytest.raises(InvalidArgumentError):
            llm.embed(texts)

    def test_generating_is_refused(self, llm: api.LLM) -> None:
        for call in (llm.generate, llm.stream):
            with pytest.raises(InvalidArgumentError, match="call embed"):
                call("a")
        with pytest.raises(InvalidArgumentError, match="call embed"):
            llm.chat([{"role": "user", "content": "a"}])
