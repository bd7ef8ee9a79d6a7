"""A Hugging Face tokenizer_config.json beside a GGUF file.

Owns what may be taken from it: the chat template and the texts of the begin and end tokens, for files that were converted with a wrong or
missing one. Must not know how they are used. How text is cut and merged stays with the GGUF file, whose ids the weights were trained with.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_cpp import log
from vllm_cpp.errors import ModelLoadError

CONFIG_NAME, TEMPLATE_NAME = "tokenizer_config.json", "chat_template.jinja"
_MAX_BYTES = 64 << 20
# Keys that would change how text becomes ids. They are not obeyed, so whoever set them is told.
_NOT_OBEYED = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """`templates` by name, "default" first of all; `special_texts` by role ("bos", "eos")."""

    path: str
    templates: dict[str, str]
    special_texts: dict[str, str]


def read_tokenizer_config(path: str | os.PathLike[str]) -> TokenizerConfig:
    """Read the file, or the one in a directory. A chat_template.jinja beside it comes first, as in transformers."""
    file = Path(path)
    if file.is_dir():
        file = file / CONFIG_NAME
    document = _parse(file)
    templates = _templates(file, document.get("chat_template"))
    beside = file.parent / TEMPLATE_NAME
    if beside.is_file():
        templates["default"] = _read(beside)
    special_texts = {}
    for role in ("bos", "eos"):
        text = document.get(f"{role}_token")
        if isinstance(text, dict):
            text = text.get("content")
        if text is None:
            continue
        if not isinstance(text, str) or not text:
            raise ModelLoadError(f"{file}: {role}_token is {text!r}, expected a token's text")
        special_texts[role] = text
    ignored = [key for key in _NOT_OBEYED if key in document]
    if ignored:
        log.once(
            f"config {file}",
            f"vllm: {file}: taken are chat_template, bos_token and eos_token; the GGUF file decides over {', '.join(ignored)}",
        )
    return TokenizerConfig(str(file), templates, special_texts)


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ModelLoadError(f"{file}: {file.stat().st_size} bytes, expected at most {_MAX_BYTES}")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(
            f"{file}: cannot be read: {error.strerror}; tokenizer_config_path names a {CONFIG_NAME} or its directory"
        ) from error
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{file}: not UTF-8: {error}") from error


def _parse(file: Path) -> dict[str, Any]:
    text = _read(file)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: not JSON: {error}; expected a {CONFIG_NAME}") from error
    if not isinstance(document, dict):
        raise ModelLoadError(f"{file}: a JSON {type(document).__name__}, expected an object with chat_template or special tokens")
    return document


def _templates(file: Path, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise ModelLoadError(f"{file}: chat_template is neither a text nor a list of name and template") from error
    if not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise ModelLoadError(f"{file}: chat_template names a template that is no text")
    return templates
