"""How tokens are chosen: the sampling parameters, with vLLM's names and defaults.

Owns: every field's range and the text of its refusal. Must not know how sampling is done, nor which structured constraints are built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vllm_cpp.errors import InvalidArgumentError

from . import fields

if TYPE_CHECKING:
    import numpy as np

STRUCTURED_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
_MAX_INT: Final = 2**31 - 1  # what the C struct can say
_MAX_SEED: Final = 2**64 - 1


@dataclass(frozen=True)
class Structured:
    """One constraint on the form of the answer: a JSON schema, a regex, a tuple of choices, a GBNF grammar, or True for any JSON object."""

    kind: str
    value: str | tuple[str, ...] | bool

    def __post_init__(self) -> None:
        fields.one_of("structured kind", self.kind, STRUCTURED_KINDS)


@fields.only_by_name
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    temperature below 0.00001 is greedy. max_tokens None, or <= 0, is unbounded: until the context is full. top_k 0 or -1 keeps all tokens.
    seed None (or -1) draws one. `logits_processor(token_ids, logits)` is called before penalties and sampling, once a step, and may edit
    the row of logits in place.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logits_processor: Callable[[list[int], np.ndarray], None] | None = None
    structured: Structured | None = None

    def __post_init__(self) -> None:
        def keep(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            keep(name, fields.number(name, getattr(self, name)))
        keep("top_k", max(0, fields.integer("top_k", self.top_k, -1, _MAX_INT)))
        keep("min_tokens", fields.integer("min_tokens", self.min_tokens, 0, _MAX_INT))
        if self.max_tokens is not None:
            tokens = fields.integer("max_tokens", self.max_tokens, -_MAX_INT - 1, _MAX_INT)
            keep("max_tokens", tokens if tokens > 0 else None)
        if self.seed is not None:
            seed = fields.integer("seed", self.seed, -1, _MAX_SEED)
            keep("seed", None if seed == -1 else seed)
        keep("ignore_eos", fields.boolean("ignore_eos", self.ignore_eos))
        keep("stop", _stop_strings(self.stop))
        keep("stop_token_ids", _token_ids(self.stop_token_ids))
        self._check_ranges()

    def _check_ranges(self) -> None:
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgumentError(f"top_p must be above 0 and at most 1, not {self.top_p:g} (1 keeps every token)")
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidArgumentError(f"min_p must be between 0 and 1, not {self.min_p:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -2.0 <= value <= 2.0:
                raise InvalidArgumentError(f"{name} must be between -2 and 2, not {value:g}")
        if self.repetition_penalty <= 0.0:
            raise InvalidArgumentError(f"repetition_penalty must be above 0, not {self.repetition_penalty:g} (1 is no penalty)")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgumentError(f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})")
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise InvalidArgumentError(f"logits_processor must be callable, not {fields.shown(self.logits_processor)}")
        if self.structured is not None and not isinstance(self.structured, Structured):
            raise InvalidArgumentError(f"structured must be a Structured, not {fields.shown(self.structured)}")


FIELD_NAMES: Final = tuple(field.name for field in dataclasses.fields(SamplingParams))


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else fields.items("stop", value)
    for index, text in enumerate(strings):
        if not isinstance(text, str) or not text:
            raise InvalidArgumentError(f"stop[{index}] must be a non-empty string, not {fields.shown(text)}")
    return strings


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    given = fields.items("stop_token_ids", value)
    return tuple(fields.integer(f"stop_token_ids[{i}]", token, 0, _MAX_INT) for i, token in enumerate(given))
