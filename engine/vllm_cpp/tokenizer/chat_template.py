"""A model's own template, from chat messages to a prompt.

Owns where the template comes from, the variables it sees, and errors that name the file, the template and the line. Must not know what a
message may contain, nor tokens. It is compiled at first use: a file with a broken template can still complete text.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateSyntaxError

from vllm_cpp.errors import InvalidArgumentError
from vllm_cpp.gguf_file import GGUFModel, open_model
from vllm_cpp.tokenizer.config_file import TokenizerConfig
from vllm_cpp.tokenizer.template_sandbox import Sandbox
from vllm_cpp.tokenizer.vocabulary import read_vocabulary

TEMPLATE_KEY = "tokenizer.chat_template"
NAMES_KEY = "tokenizer.chat_templates"
_MAX_SOURCE = 256 << 10  # characters; the largest in use have under 32 thousand


class ChatTemplate:
    """Made with `ChatTemplate.from_gguf`. Any thread may render."""

    def __init__(self, source: str, templates: Mapping[str, str], special_texts: Mapping[str, str]) -> None:
        self.source = source
        self.templates = dict(templates)
        self._variables = {"bos_token": "", "eos_token": "", **special_texts}
        self._sandbox = Sandbox()
        self._compiled: dict[str, Template] = {}
        self._compiling = threading.Lock()

    @classmethod
    def from_gguf(cls, source: str | os.PathLike[str] | GGUFModel, config: TokenizerConfig | None = None) -> ChatTemplate:
        """The template of a GGUF file or an opened model; `config` overrides what it holds. A file without one gives an object whose
        render() says so. Raises ModelLoadError if the file cannot be read."""
        if not isinstance(source, GGUFModel):
            with open_model(source) as model:
                return cls.from_gguf(model, config)
        kv = source.kv
        templates = {}
        for name in kv.get_array(NAMES_KEY, "str", []):
            key = f"{TEMPLATE_KEY}.{name}"
            if key in kv:
                templates[name] = kv.get_str(key)
        if TEMPLATE_KEY in kv:
            templates["default"] = kv.get_str(TEMPLATE_KEY)
        special_texts = read_vocabulary(source).special_texts
        if config is not None:
            templates |= config.templates
            special_texts |= {f"{role}_token": text for role, text in config.special_texts.items()}
        return cls(source.path, templates, special_texts)

    @property
    def exists(self) -> bool:
        return bool(self.templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`, ready for Tokenizer.encode_chat. Further keywords become variables of the template. Raises
        InvalidArgumentError naming the template and the line; what the template itself refuses comes in its own words."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidArgumentError("messages to render are not a list of objects with a role and a content")
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        template = self._template(name)
        known = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._sandbox.run(template, {**self._variables, **known, **variables})
        except Exception as error:  # a template can raise whatever Python can
            raise InvalidArgumentError(self._text(name, error, self._line(template, error.__traceback__, name))) from error

    def _label(self, name: str) -> str:
        return f"<chat template {name}>"

    def _template(self, name: str) -> Template:
        source = self.templates.get(name)
        if source is None:
            raise InvalidArgumentError(
                f"{self.source} has no chat template ({TEMPLATE_KEY}), and no other model's will do: give a tokenizer_config.json "
                "that has one (tokenizer_config_path), or complete a prompt in the model's own format"
            )
        with self._compiling:
            if name not in self._compiled:
                if len(source) > _MAX_SOURCE:
                    raise InvalidArgumentError(
                        f"{self.source}: chat template '{name}' has {len(source)} characters, expected at most {_MAX_SOURCE}"
                    )
                try:
                    self._compiled[name] = self._sandbox.compiled(source, self._label(name))
                except Exception as error:  # the parser and Python's own compiler, on hostile text
                    line = error.lineno if isinstance(error, TemplateSyntaxError) else None
                    raise InvalidArgumentError(self._text(name, error, line)) from error
            return self._compiled[name]

    def _line(self, template: Template, trace: TracebackType | None, name: str) -> int | None:
        """The template's line that the innermost of its frames was at."""
        found = None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._label(name):
                found = trace.tb_lineno
            trace = trace.tb_next
        return template.get_corresponding_lineno(found) if found is not None else None

    def _text(self, name: str, error: Exception, line: int | None) -> str:
        at = "" if line is None else f", line {line}"
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
        return f"{self.source}: chat template '{name}'{at}: {text}"
