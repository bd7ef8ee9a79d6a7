"""The messages of a chat, and the prompt they make.

Owns: which roles and contents a message may have, and how the rendered template becomes token ids. Must not know sampling or responses.
"""

from __future__ import annotations

from typing import Any, Final

from vllm_cpp.config import fields
from vllm_cpp.core import Engine
from vllm_cpp.errors import InvalidArgumentError

ROLES: Final = ("system", "developer", "user", "assistant")
_FIELDS: Final = ("role", "content", "name", "reasoning_content")
# In messages that a client echoes from an answer; empty they say nothing, and what they would say is not built.
_EMPTY: Final = ("refusal", "audio", "annotations", "tool_calls", "function_call")


def parse(value: Any) -> list[dict[str, Any]]:
    """Checked messages with plain text contents, as a template wants them."""
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError(f"messages must be a list of at least one message, not {fields.shown(value)}")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def prompt(engine: Engine, messages: list[dict[str, Any]], keywords: dict[str, Any]) -> list[int]:
    """The token ids that the messages make through the model's template."""
    return engine.encode_chat(engine.chat_template.render(messages, tools=None, add_generation_prompt=True, **keywords))


def _message(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{where} must be an object, not {fields.shown(value)}")
    given = {name: item for name, item in value.items() if item is not None}
    for name in _EMPTY:
        if given.pop(name, None):
            raise InvalidArgumentError(f"{where}.{name} is not built in this version; leave it out")
    fields.refuse_unknown(where, given, _FIELDS)
    role = fields.one_of(f"{where}.role", given.get("role"), ROLES)
    message = {"role": "system" if role == "developer" else role, "content": _content(f"{where}.content", given.get("content"))}
    for name in ("name", "reasoning_content"):
        if name in given:
            message[name] = _text(f"{where}.{name}", given[name])
    return message


def _content(where: str, value: Any) -> str:
    if not isinstance(value, list):
        return _text(where, value)
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(value))


def _part(where: str, value: Any) -> str:
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{where} must be an object, not {fields.shown(value)}")
    if value.get("type") != "text":
        raise InvalidArgumentError(f"{where}.type is {fields.shown(value.get('type'))}; this model reads text only, so it must be 'text'")
    return _text(f"{where}.text", value.get("text"))


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{where} must be a string, not {fields.shown(value)}")
    return value
