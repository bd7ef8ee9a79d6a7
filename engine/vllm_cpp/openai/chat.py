"""Chat completions: one request object in; one response object, or chunks of one, out.

Owns: the fields of a chat-completions request (served, inert, or refused by name), the prompt that the messages make through the model's
template, the shape of responses and chunks. Must not know HTTP, or how a callback reaches its caller.

`model` and `stream` are ignored: the engine has one model, and the function called decides about streaming. max_tokens is unbounded unless
given, as OpenAI has it. Tools, structured answers, several choices and log probabilities are refused by name unless they say "none".
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vllm_cpp import log
from vllm_cpp.config import fields
from vllm_cpp.config.sampling import SamplingParams
from vllm_cpp.core import Engine
from vllm_cpp.errors import InvalidArgumentError
from vllm_cpp.openai import messages as message_list
from vllm_cpp.request import Completion, Request

OnChunk = Callable[[dict[str, Any]], bool | None]

TOOL_PARSERS: Final = ("none", "hermes", "qwen3")
REASONING_PARSERS: Final = ("none", "deepseek_r1", "qwen3")

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
)
_HANDLED: Final = ("messages", "max_tokens", "max_completion_tokens", "stop", "stream_options", "chat_template_kwargs")
# Sent by clients for a provider's bookkeeping; no answer depends on them.
_INERT: Final = (
    "model",
    "stream",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
# Not built: the values that ask for nothing are accepted.
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_KNOWN: Final = (*_HANDLED, *_SAMPLING, *_INERT, *_REFUSED)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request."""

    messages: list[dict[str, Any]]
    params: SamplingParams
    template_keywords: dict[str, Any]
    include_usage: bool


def parse(document: str | bytes | dict[str, Any]) -> ChatRequest:
    """Check a request object, given as JSON text or already decoded. A field that is null is a field left out."""
    given = {name: value for name, value in _decoded(document).items() if value is not None}
    fields.refuse_unknown("a chat request", given, _KNOWN)
    for name, harmless in _REFUSED.items():
        if name in given and not any(given[name] == value and type(given[name]) is type(value) for value in harmless):
            hint = f"; only {json.dumps(harmless[0])} is accepted" if harmless else "; leave it out"
            raise InvalidArgumentError(f"{name} is not built in this version{hint}")
    if "messages" not in given:
        raise InvalidArgumentError("messages is missing: a chat request needs at least one message")
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    sampling["stop"] = _stop(given.get("stop", ()))
    sampling["max_tokens"] = _max_tokens(given)
    return ChatRequest(
        messages=message_list.parse(given["messages"]),
        params=SamplingParams(**sampling),
        template_keywords=_template_keywords(given),
        include_usage=_include_usage(_object("stream_options", given)),
    )


def complete(engine: Engine, document: str | bytes | dict[str, Any]) -> dict[str, Any]:
    """The response object of a request."""
    request, respond = begin(engine, document)
    return respond(_wait(request))


def begin(engine: Engine, document: str | bytes | dict[str, Any]) -> tuple[Request, Callable[[Completion], dict[str, Any]]]:
    """As `complete`, without waiting: the request, and what makes the response object of its completion."""
    request, _ = _prepare(engine, document)
    envelope = _Envelope("chat.completion", engine)

    def respond(completion: Completion) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
        }
        return envelope.around([choice], usage=_usage(completion))

    return engine.start(request), respond


def stream(engine: Engine, document: str | bytes | dict[str, Any], on_chunk: OnChunk) -> None:
    """Call `on_chunk` with each chunk object: the role, the texts, the finish reason, the usage if asked for. Returns after the last."""
    _wait(submit(engine, document, on_chunk))


def _wait(request: Request) -> Completion:
    try:
        return request.wait()
    except BaseException:  # the user interrupts: nobody will ask for the answer
        request.cancel()
        raise


def submit(engine: Engine, document: str | bytes | dict[str, Any], on_chunk: OnChunk) -> Request:
    """As `stream`, without waiting. Chunks come from a thread of the library; False from `on_chunk` ends the request without a last one."""
    request, chat = _prepare(engine, document)
    envelope = _Envelope("chat.completion.chunk", engine)

    def send(delta: dict[str, str], finish_reason: str | None = None) -> bool:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        answer = on_chunk(envelope.around([choice], **({"usage": None} if chat.include_usage else {})))
        return answer is None or bool(answer)

    role_sent = False

    def on_delta(text: str, finished: bool) -> bool:
        nonlocal role_sent
        if not role_sent:
            role_sent = True
            if not send({"role": "assistant", "content": ""}):
                return False
        if text and not send({"content": text}):
            return False
        if finished and not request.error and send({}, request.completion.finish_reason) and chat.include_usage:
            on_chunk(envelope.around([], usage=_usage(request.completion)))
        return True

    request.on_delta = on_delta
    return engine.start(request)


def _prepare(engine: Engine, document: str | bytes | dict[str, Any]) -> tuple[Request, ChatRequest]:
    engine.refuse_unless_it_generates()
    _check_parsers(engine)
    chat = parse(document)
    prompt = message_list.prompt(engine, chat.messages, chat.template_keywords)
    return engine.prepare(prompt, chat.params), chat


def _check_parsers(engine: Engine) -> None:
    """Names are checked here and not at load: until the first chat they do not matter."""
    params = engine.params
    for name, value, known in (
        ("tool_parser", params.tool_parser, TOOL_PARSERS),
        ("reasoning_parser", params.reasoning_parser, REASONING_PARSERS),
    ):
        if value is not None:
            fields.one_of(name, value, known)
    if params.reasoning_parser not in (None, "none"):
        log.once(
            f"reasoning_parser {params.reasoning_parser}",
            f"vllm: reasoning_parser={params.reasoning_parser}: not built in this version; what the model thinks stays in the content",
        )


def _decoded(document: str | bytes | dict[str, Any]) -> dict[str, Any]:
    if isinstance(document, str | bytes):
        try:
            document = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"a chat request is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgumentError(f"a chat request must be a JSON object, not {fields.shown(document)}")
    return document


def _object(name: str, given: dict[str, Any]) -> dict[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{name} must be an object, not {fields.shown(value)}")
    return value


def _template_keywords(given: dict[str, Any]) -> dict[str, Any]:
    keywords = _object("chat_template_kwargs", given)
    for name in keywords:
        if not isinstance(name, str):
            raise InvalidArgumentError(f"chat_template_kwargs names variables of the template by strings, not {fields.shown(name)}")
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in keywords:
            raise InvalidArgumentError(f"chat_template_kwargs.{name} is set by the request itself; leave it out")
    return keywords


def _include_usage(options: dict[str, Any]) -> bool:
    fields.refuse_unknown("stream_options", options, ("include_usage", "include_obfuscation"))
    return fields.boolean("stream_options.include_usage", options.get("include_usage") or False)


def _stop(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str | list | tuple):
        raise InvalidArgumentError(f"stop must be a string or a list of strings, not {fields.shown(value)}")
    return (value,) if isinstance(value, str) else tuple(value)


def _max_tokens(given: dict[str, Any]) -> int | None:
    """The newer name wins, as with OpenAI; each is checked by its own name."""
    limit = None
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given:
            limit = fields.integer(name, given[name], -(2**31), 2**31 - 1)
    return limit


class _Envelope:
    """What all objects of one answer have in common."""

    def __init__(self, kind: str, engine: Engine) -> None:
        self._common = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": engine.model_name,
        }

    def around(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._common, "choices": choices, **more}


def _usage(completion: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.cached_prompt_tokens},
    }
