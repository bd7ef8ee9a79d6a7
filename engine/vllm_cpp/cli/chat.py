"""A conversation on a terminal.

Owns: reading lines, the messages so far, and the keys: Ctrl-C stops an answer (and clears a line), Ctrl-D leaves. Must not know how a
prompt is made of messages.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

from vllm_cpp import log
from vllm_cpp.cli import output
from vllm_cpp.cli.arguments import PROGRAM
from vllm_cpp.errors import InvalidArgumentError, VllmError

if TYPE_CHECKING:
    from vllm_cpp.api import LLM
    from vllm_cpp.config.sampling import SamplingParams

_PROMPT: Final = "> "


def converse(model: LLM, sampling: SamplingParams) -> int:
    """Talk until the user leaves; the exit code."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing and history
    log.line(f"{PROGRAM}: Ctrl-C stops an answer, Ctrl-D leaves")
    fields = _request_fields(sampling)
    messages: list[dict[str, Any]] = []
    while True:
        try:
            text = _read_line()
        except KeyboardInterrupt:
            log.line("")
            continue
        except EOFError:
            log.line("")
            return 0
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = _answer(model, messages, fields)
        except InvalidArgumentError as error:  # no chat template, or a conversation longer than the context
            messages.pop()
            log.line(f"{PROGRAM}: {error}")
            if not messages:
                return 1
        except VllmError as error:
            log.line(f"{PROGRAM}: completion failed (status {error.status}): {error}")
            return 1
        else:
            messages.append({"role": "assistant", "content": answer})


def _answer(model: LLM, messages: list[dict[str, Any]], fields: dict[str, Any]) -> str:
    """Print the answer as it comes; what was said until the user stopped it counts as said."""
    parts: list[str] = []
    chunks = model.chat(messages, stream=True, **fields)
    try:
        for chunk in chunks:
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                parts.append(text)
                output.write(text)
    except KeyboardInterrupt:
        chunks.close()
    output.write("\n")
    return "".join(parts)


def _read_line() -> str:
    # input() shows its prompt on standard output, which belongs to the answers unless both ends are the terminal.
    if sys.stdout.isatty():
        return input(_PROMPT)
    log.status(_PROMPT)
    try:
        return input()
    finally:
        log.status("")


def _request_fields(sampling: SamplingParams) -> dict[str, Any]:
    fields = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "seed": sampling.seed}
    return {**fields, "max_tokens": sampling.max_tokens}
