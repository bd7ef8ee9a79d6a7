"""C structs as the engine's parameters.

Owns the meaning of the fields of `vllm_model_params` and `vllm_sampling_params` where C and Python differ: NULL, 0 and switches in numbers.
Must not judge values: `vllm_cpp.config` does, with one wording for all doors.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import Any

from vllm_cpp.config.engine import EngineParams, device_name, tri_state
from vllm_cpp.config.sampling import SamplingParams, Structured
from vllm_cpp.errors import InvalidArgumentError


class StructReader:
    """Reads structs through cffi; everything it returns is a copy, so that the caller may free its own at once."""

    def __init__(self, ffi: Any) -> None:
        self._ffi = ffi

    def text(self, name: str, pointer: Any) -> str:
        try:
            return str(self._ffi.string(pointer).decode())
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(f"{name} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None

    def optional_text(self, name: str, pointer: Any) -> str | None:
        """NULL and "" are both unset."""
        return (self.text(name, pointer) or None) if pointer else None

    def texts(self, name: str, array_pointer: Any, count: int) -> tuple[str, ...]:
        if count < 0:
            raise InvalidArgumentError(f"n_{name} is {count}; expected 0 or more")
        if count and not array_pointer:
            raise InvalidArgumentError(f"{name} is NULL, but n_{name} is {count}; expected as many strings, or 0")
        for i in range(count):
            if not array_pointer[i]:
                raise InvalidArgumentError(f"{name}[{i}] is NULL; expected {count} strings")
        return tuple(self.text(f"{name}[{i}]", array_pointer[i]) for i in range(count))

    def engine_params(self, c: Any) -> EngineParams:
        return EngineParams(
            model_path=os.fsdecode(self._ffi.string(c.model_path)),  # a path is bytes, not text
            tokenizer_config_path=self.optional_text("tokenizer_config_path", c.tokenizer_config_path),
            block_size=c.block_size,
            num_blocks=c.num_blocks,
            max_model_len=c.max_model_len,
            max_num_seqs=c.max_num_seqs,
            tool_parser=self.optional_text("tool_parser", c.tool_parser),
            reasoning_parser=self.optional_text("reasoning_parser", c.reasoning_parser),
            speculative_config=self.optional_text("speculative_config", c.speculative_config),
            enable_prefix_caching=tri_state("enable_prefix_caching", c.enable_prefix_caching),
            max_num_batched_tokens=c.max_num_batched_tokens,
            scheduling_policy=self.optional_text("scheduling_policy", c.scheduling_policy) or "fcfs",
            kv_transfer_config=self.optional_text("kv_transfer_config", c.kv_transfer_config),
            offload_config=self.optional_text("offload_config", c.offload_config),
            enable_jump_forward=tri_state("enable_jump_forward", c.enable_jump_forward),
            device=device_name(c.device),
            gpu_memory_utilization=c.gpu_memory_utilization,
            kv_cache_memory_bytes=c.kv_cache_memory_bytes,
            language_model_only=bool(c.language_model_only),
            limit_mm_per_prompt=self.optional_text("limit_mm_per_prompt", c.limit_mm_per_prompt),
        )

    def sampling_params(self, c: Any) -> SamplingParams:
        return SamplingParams(
            temperature=c.temperature,
            top_p=c.top_p,
            top_k=c.top_k,
            min_p=c.min_p,
            max_tokens=c.max_tokens,
            seed=c.seed if c.has_seed else None,
            presence_penalty=c.presence_penalty,
            frequency_penalty=c.frequency_penalty,
            repetition_penalty=c.repetition_penalty,
            min_tokens=c.min_tokens,
            ignore_eos=bool(c.ignore_eos),
            stop=self.texts("stop", c.stop, c.n_stop),
            structured=self._structured(c),
            logits_processor=self._logits_processor(c.logits_processor, c.logits_processor_user_data),
        )

    def _structured(self, c: Any) -> Structured | None:
        wanted: dict[str, Any] = {
            "json": self.optional_text("structured_json", c.structured_json),
            "regex": self.optional_text("structured_regex", c.structured_regex),
            "choice": self.texts("structured_choice", c.structured_choice, c.n_structured_choice),
            "grammar": self.optional_text("structured_grammar", c.structured_grammar),
            "json_object": bool(c.structured_json_object),
        }
        wanted = {kind: value for kind, value in wanted.items() if value}
        if len(wanted) > 1:
            raise InvalidArgumentError(f"structured_{' and structured_'.join(wanted)} are both set; expected at most one constraint")
        return Structured(*next(iter(wanted.items()))) if wanted else None

    def _logits_processor(self, function: Any, user_data: Any) -> Callable[[list[int], Any], None] | None:
        """C's processor, called with the engine's own row: nothing is copied but the ids that are new since the last step."""
        if not function:
            return None
        ids = array("i")

        def process(token_ids: list[int], logits: Any) -> None:
            del ids[len(token_ids) :]
            ids.extend(token_ids[len(ids) :])
            ids_pointer = self._ffi.from_buffer("int32_t[]", ids) if ids else self._ffi.NULL
            row = self._ffi.from_buffer("float[]", logits, require_writable=True)
            function(ids_pointer, len(ids), row, len(row), user_data)

        return process
