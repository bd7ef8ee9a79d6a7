"""Chat completions over a fake model: requests checked field by field, responses and chunks as OpenAI's clients read them."""

from __future__ import annotations

import json
import re
import threading

import pytest

from fakes import BOS, FakeRunner, FakeTokenizer, decoded, engine_params, fake_logits
from vllm_cpp import log
from vllm_cpp.core import Engine
from vllm_cpp.errors import GenerationError, InvalidArgumentError, UnknownKeywordError
from vllm_cpp.openai import chat
from vllm_cpp.request import Request

HELLO = [{"role": "user", "content": "hello"}]


class Template:
    """Writes what it is given in a form that tests can read."""

    def render(self, messages, tools=None, add_generation_prompt=True, **keywords):
        lines = [f"<{message['role']}>{message['content']}" for message in messages]
        lines += [f"[{name}={value}]" for name, value in keywords.items()]
        return "".join(lines) + ("<assistant>" if add_generation_prompt else "")


TEMPLATE = Template()


@pytest.fixture
def make():
    engines = []

    def build(runner=None, tokenizer=None, template=TEMPLATE, **keywords):
        engines.append(Engine(runner or FakeRunner(), tokenizer or FakeTokenizer(), engine_params(**keywords), template))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def request(messages=HELLO, **more):
    return {"messages": messages, "temperature": 0, "max_tokens": 6, **more}


def alone(prompt, count):
    tokens = list(prompt.encode())
    for _ in range(count):
        tokens.append(int(fake_logits(tokens).argmax()))
    return decoded(tokens[-count:])


def prompt_seen(runner):
    return bytes(token for chunk in runner.batches[0] for token in chunk.token_ids).decode()


# answers


def test_a_response(make):
    engine = make()
    response = chat.complete(engine, request())
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", response.pop("id"))
    assert isinstance(response.pop("created"), int)
    content = alone("<user>hello<assistant>", 6)
    assert response == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": content}, "logprobs": None, "finish_reason": "length"},
        ],
        "usage": {"prompt_tokens": 22, "completion_tokens": 6, "total_tokens": 28, "prompt_tokens_details": {"cached_tokens": 0}},
    }
    assert chat.complete(engine, json.dumps(request()))["choices"][0]["message"]["content"] == content
    assert chat.complete(engine, json.dumps(request()).encode())["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_chunks(make):
    engine = make()
    content = chat.complete(engine, request())["choices"][0]["message"]["content"]
    chunks = []
    chat.stream(engine, request(), chunks.append)
    assert {(chunk["id"], chunk["object"], chunk["model"], chunk["created"]) for chunk in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", "fake", chunks[0]["created"])
    }
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) == len(chunks)
    assert choices[0] == {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all(choice["finish_reason"] is None and choice["delta"]["content"] for choice in choices[1:-1])
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == content
    assert all("usage" not in chunk for chunk in chunks)
    json.dumps(chunks)


def test_usage_comes_last_when_asked_for(make):
    chunks = []
    chat.stream(make(), request(stream_options={"include_usage": True}), chunks.append)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("wanted", [1, 2])
def test_false_ends_the_stream_without_a_last_chunk(make, wanted):
    engine = make(FakeRunner(max_model_len=100_000, num_blocks=8000))
    chunks = []
    chat.stream(engine, request(max_tokens=None), lambda chunk: chunks.append(chunk) or len(chunks) < wanted)
    assert len(chunks) == wanted
    assert engine.stats()["requests_finished"]["abort"] == 1


def test_a_failed_generation_has_no_finish_chunk(make):
    runner = FakeRunner()

    def fail(chunks):
        if chunks[0].start > 25:
            raise MemoryError("no room")

    runner.before_run = fail
    engine = make(runner)
    chunks = []
    with pytest.raises(GenerationError, match="no room"):
        chat.stream(engine, request(max_tokens=50), chunks.append)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    with pytest.raises(GenerationError, match="no room"):
        chat.complete(engine, request([{"role": "user", "content": "another prompt"}], max_tokens=50))


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_cut_into_tokens(make):
    tokenizer = FakeTokenizer()
    tokenizer.encode_chat = lambda text: pytest.fail("it was cut")
    with pytest.raises(InvalidArgumentError, match=r"prompt has \d{6} characters, and max_model_len=512 tokens .* hold 2048; shorten it"):
        chat.complete(make(tokenizer=tokenizer), request([{"role": "user", "content": "a" * 100_000}]))


@pytest.mark.parametrize("ask", [chat.complete, lambda engine, document: chat.stream(engine, document, lambda chunk: True)])
def test_an_interrupted_wait_ends_the_request(make, monkeypatch, ask):
    goes_on, waited_for = threading.Event(), []

    def interrupted(request, timeout=None):
        waited_for.append(request)
        raise KeyboardInterrupt

    engine = make()
    engine._runner.before_run = lambda chunks: goes_on.wait()
    with monkeypatch.context() as patch:
        patch.setattr(Request, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask(engine, request())
    goes_on.set()
    assert waited_for[0].wait(10).finish_reason == "abort"


def test_an_answer_is_unbounded_unless_told(make):
    engine = make(FakeRunner(max_model_len=64))
    response = chat.complete(engine, {"messages": HELLO, "temperature": 0})
    assert response["usage"]["total_tokens"] == 64
    assert chat.complete(engine, request(max_completion_tokens=3))["usage"]["completion_tokens"] == 3


def test_sampling_fields_reach_the_sampler():
    params = chat.parse(
        request(
            top_p=0.5,
            top_k=3,
            min_p=0.1,
            seed=9,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            repetition_penalty=1.3,
            min_tokens=2,
            ignore_eos=True,
            stop_token_ids=[5],
            stop=["x", "y"],
        )
    ).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed, params.max_tokens) == (0, 0.5, 3, 0.1, 9, 6)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.3)
    assert (params.min_tokens, params.ignore_eos, params.stop_token_ids, params.stop) == (2, True, (5,), ("x", "y"))
    assert chat.parse(request(stop="xyz")).params.stop == ("xyz",)
    assert chat.parse({"messages": HELLO}).params.temperature == 1.0


def test_the_model_is_named_by_its_file():
    with Engine(FakeRunner(), FakeTokenizer(), engine_params(model_path="/a/b/Name-Q4_K-00001-of-00003.gguf"), TEMPLATE) as engine:
        assert chat.complete(engine, request(model="other", stream=True))["model"] == "Name-Q4_K"


# prompts


def test_contents_may_come_in_text_parts_and_a_developer_is_a_system(make):
    runner = FakeRunner()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": [], "annotations": []},
    ]
    chat.complete(make(runner), request(messages))
    assert prompt_seen(runner) == "<system>Be brief.<user>one\ntwo<assistant>yes<assistant>"


def test_template_keywords_reach_the_template(make):
    runner = FakeRunner()
    chat.complete(make(runner), request(chat_template_kwargs={"enable_thinking": False}))
    assert prompt_seen(runner) == "<user>hello[enable_thinking=False]<assistant>"


def test_the_prompt_is_encoded_as_a_templates_text(make):
    runner = FakeRunner()
    chat.complete(make(runner, FakeTokenizer(add_bos=True)), request())
    assert runner.batches[0][0].token_ids[:2] == [BOS, ord("<")]


# refusals


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ("{not json", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        ("[]", "must be a JSON object"),
        (7, "must be a JSON object"),
        ("{}", "messages is missing"),
        ({"messages": None}, "messages is missing"),
        (request([]), "messages must be a list of at least one"),
        (request("hello"), "messages must be a list"),
        (request(["hello"]), r"messages\[0\] must be an object"),
        (request([{"content": "x"}]), r"messages\[0\]\.role"),
        (request([*HELLO, {"role": "wizard", "content": "x"}]), r"messages\[1\]\.role is 'wizard'.*user"),
        (request([{"role": "user"}]), r"messages\[0\]\.content must be a string"),
        (request([{"role": "user", "content": 5}]), r"messages\[0\]\.content must be a string, not 5"),
        (request([{"role": "user", "content": [{"type": "image_url"}]}]), r"messages\[0\]\.content\[0\]\.type is 'image_url'.*text only"),
        (request([{"role": "user", "content": ["x"]}]), r"content\[0\] must be an object"),
        (request([{"role": "user", "content": [{"type": "text"}]}]), r"content\[0\]\.text must be a string"),
        (request([{"role": "assistant", "content": "", "tool_calls": [{}]}]), r"messages\[0\]\.tool_calls is not built"),
        (request([{"role": "user", "content": "x", "name": 3}]), r"messages\[0\]\.name must be a string"),
        (request(temperature="hot"), "temperature must be a number"),
        (request(temperature=True), "temperature must be a number"),
        ('{"messages": [{"role": "user", "content": "x"}], "top_p": NaN}', "top_p must be finite"),
        (request(top_p=0), "top_p must be above 0"),
        (request(max_tokens="6"), "max_tokens must be an integer"),
        (request(max_completion_tokens=1.5), "max_completion_tokens must be an integer"),
        (request(stop=5), "stop must be a string or a list"),
        (request(stop=[""]), r"stop\[0\]"),
        (request(stream_options=True), "stream_options must be an object"),
        (request(stream_options={"include_usage": 1}), r"stream_options\.include_usage"),
        (request(chat_template_kwargs={1: 2}), r"chat_template_kwargs names variables of the template by strings, not 1"),
        (request(chat_template_kwargs={"tools": []}), r"chat_template_kwargs\.tools"),
        (request(n=2), "n is not built in this version; only 1"),
        (request(n=True), "n is not built"),
        (request(logprobs=True), "logprobs is not built"),
        (request(top_logprobs=5), "top_logprobs is not built"),
        (request(logit_bias={"5": 1}), "logit_bias is not built"),
        (request(tools=[{"type": "function"}]), "tools is not built"),
        (request(tool_choice="auto"), 'tool_choice is not built in this version; only "none"'),
        (request(response_format={"type": "json_object"}), "response_format is not built"),
        (request(modalities=["audio"]), "modalities is not built"),
        (request(reasoning_effort="high"), "reasoning_effort is not built in this version; leave it out"),
    ],
)
def test_requests_that_are_refused(make, document, what):
    engine = make()
    for call in (lambda: chat.complete(engine, document), lambda: chat.stream(engine, document, lambda chunk: True)):
        with pytest.raises(InvalidArgumentError, match=what):
            call()
    assert chat.complete(engine, request())["choices"]


def test_unknown_fields_are_refused_with_the_nearest(make):
    with pytest.raises(UnknownKeywordError, match="no parameter 'temprature'; did you mean 'temperature'"):
        chat.complete(make(), request(temprature=1))
    with pytest.raises(UnknownKeywordError, match=r"messages\[0\] has no parameter 'contents'; did you mean 'content'"):
        chat.complete(make(), request([{"role": "user", "content": "", "contents": ""}]))


def test_fields_that_ask_for_nothing_are_accepted(make):
    inert = {
        "model": "any",
        "stream": True,
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "parallel_tool_calls": True,
        "n": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "audio": None,
        "reasoning_effort": None,
        "temperature": 0,
        "seed": None,
    }
    engine = make()
    assert chat.complete(engine, request(**inert))["choices"] == chat.complete(engine, request())["choices"]


@pytest.mark.parametrize("name", ["tool_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_at_the_first_chat(make, name):
    engine = make(**{name: "no-such-parser"})
    with pytest.raises(InvalidArgumentError, match=f"{name} is 'no-such-parser', which is not one of: none"):
        chat.complete(engine, request())


def test_known_parsers_serve_and_what_they_do_not_do_is_said(make, capfd):
    log.forget()
    for names in ({"tool_parser": "hermes"}, {"tool_parser": "none"}, {"reasoning_parser": "none"}, {"reasoning_parser": "deepseek_r1"}):
        assert chat.complete(make(**names), request())["choices"][0]["message"]["content"]
    (line,) = capfd.readouterr().err.splitlines()
    assert "reasoning_parser=deepseek_r1" in line
