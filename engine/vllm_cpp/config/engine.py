"""What an engine is built from: the twin of `vllm_model_params`, with the same names, defaults and order of refusal. Only `threads` and
`kv_cache_dtype` have no field there.

Owns: every field's check, and the refusal by name of what this build does not do. Must not know how a model is found, read or run.

A refusal comes in two steps, because the order of the C API is "documents and enums, then the device, then the path": constructing
`EngineParams` refuses what is wrong in itself (InvalidArgumentError); `refuse_what_is_not_built` refuses what is right but cannot be
honoured here (ModelLoadError), before any file is opened.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final

from vllm_cpp import env, log
from vllm_cpp.errors import InvalidArgumentError, ModelLoadError

from . import fields
from .cpus import physical_cores

DEVICES: Final = ("auto", "cpu", "cuda")
SCHEDULING_POLICIES: Final = ("fcfs", "priority", "lpm")
KV_CACHE_DTYPES: Final = ("f16", "q8_0", "f32")
SPECULATIVE_METHODS: Final = ("mtp", "ngram", "draft_model", "eagle", "eagle3", "medusa")
DEFAULT_BLOCK_SIZE: Final = 32
DEFAULT_GPU_MEMORY_UTILIZATION: Final = 0.92
_MAX_NUM_SEQS_WHEN_ZERO: Final = 8
_MAX_INT: Final = 2**31 - 1
_MAX_LONG: Final = 2**63 - 1
_MAX_THREADS: Final = 1024


def tri_state(name: str, number: int) -> bool | None:
    """A C switch: 0 the default, 1 on, 2 off."""
    if number not in (0, 1, 2):
        raise InvalidArgumentError(f"{name} must be 0 (default), 1 (on) or 2 (off), not {fields.shown(number)}")
    return (None, True, False)[number]


def device_name(number: int) -> str:
    """The device a C caller's number means."""
    if not 0 <= number < len(DEVICES):
        raise InvalidArgumentError(f"device must be 0 (auto), 1 (cpu) or 2 (cuda), not {fields.shown(number)}")
    return DEVICES[number]


@fields.only_by_name
@dataclass(frozen=True, kw_only=True)
class EngineParams:
    """Parameters of one engine. 0 and None mean "the default"; block_size and max_num_seqs are stored resolved."""

    model_path: str
    tokenizer_config_path: str | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 32
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    speculative_config: str | dict[str, Any] | None = None
    enable_prefix_caching: bool | None = None
    max_num_batched_tokens: int = 0
    scheduling_policy: str = "fcfs"
    kv_transfer_config: str | dict[str, Any] | None = None
    offload_config: str | dict[str, Any] | None = None
    enable_jump_forward: bool | None = None
    device: str = "auto"
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "f16"
    language_model_only: bool = False
    limit_mm_per_prompt: str | dict[str, int] | None = None
    threads: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model_path, str) or not self.model_path:
            raise InvalidArgumentError(f"model_path must be a non-empty string, not {fields.shown(self.model_path)}")
        self._check_documents()
        self._check_enums()
        self._check_sizes()

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_documents(self) -> None:
        for name in ("tokenizer_config_path", "tool_parser", "reasoning_parser"):
            self._keep(name, fields.optional_text(name, getattr(self, name)))
        for name in ("speculative_config", "kv_transfer_config", "limit_mm_per_prompt"):
            self._keep(name, _json_object(name, getattr(self, name)))
        self._check_names_in_documents()
        for modality, limit in (self.limit_mm_per_prompt or {}).items():
            fields.integer(f"limit_mm_per_prompt.{modality}", limit, 0, _MAX_INT)

    def _check_names_in_documents(self) -> None:
        """A name nobody knows is the caller's mistake; a known one that is not built here is refused later, by name."""
        method = (self.speculative_config or {}).get("method")
        if method is not None and method not in SPECULATIVE_METHODS:
            raise InvalidArgumentError(
                f"speculative_config method {fields.shown(method)} is unknown (expected one of: {' '.join(SPECULATIVE_METHODS)})"
            )
        connector = (self.kv_transfer_config or {}).get("kv_connector")
        if connector is not None:
            raise InvalidArgumentError(
                f"kv_transfer_config kv_connector {fields.shown(connector)} is not registered; no connector is, in this build"
            )

    def _check_enums(self) -> None:
        self._keep("scheduling_policy", fields.one_of("scheduling_policy", self.scheduling_policy or "fcfs", SCHEDULING_POLICIES))
        self._keep("device", fields.one_of("device", self.device, DEVICES))
        self._keep("kv_cache_dtype", fields.one_of("kv_cache_dtype", self.kv_cache_dtype or "f16", KV_CACHE_DTYPES))
        for name in ("enable_prefix_caching", "enable_jump_forward"):
            if getattr(self, name) is not None:
                fields.boolean(name, getattr(self, name))
        fields.boolean("language_model_only", self.language_model_only)

    def _check_sizes(self) -> None:
        for name in ("block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            self._keep(name, fields.integer(name, getattr(self, name) or 0, 0, _MAX_INT))
        self._keep("block_size", self.block_size or DEFAULT_BLOCK_SIZE)
        if self.max_model_len == 1:
            raise InvalidArgumentError("max_model_len must be at least 2, a token of prompt and one of answer, not 1 (0: the model's own)")
        if self.block_size % 16:
            raise InvalidArgumentError(f"block_size must be a multiple of 16, not {self.block_size}")
        self._keep("max_num_seqs", self.max_num_seqs or _MAX_NUM_SEQS_WHEN_ZERO)
        self._keep("threads", fields.integer("threads", self.threads or 0, 0, _MAX_THREADS))
        kv_bytes = fields.integer("kv_cache_memory_bytes", self.kv_cache_memory_bytes or 0, 0, _MAX_LONG)
        self._keep("kv_cache_memory_bytes", kv_bytes or None)
        fraction = fields.number("gpu_memory_utilization", self.gpu_memory_utilization)
        if not 0.0 <= fraction <= 1.0:
            raise InvalidArgumentError(f"gpu_memory_utilization must be between 0 and 1, not {fraction:g}")
        self._keep("gpu_memory_utilization", fraction)

    @property
    def num_threads(self) -> int:
        """Worker threads: the parameter, else VLLM_CPP_CPU_THREADS, else the physical cores this process may use."""
        return self.threads or min(env.number("VLLM_CPP_CPU_THREADS") or physical_cores(), _MAX_THREADS)

    @property
    def jump_forward(self) -> bool:
        """Whether jump-forward decoding is wanted; the variable wins over the parameter."""
        variable = env.switch("VT_ENABLE_JUMP_FORWARD")
        return bool(self.enable_jump_forward) if variable is None else variable


FIELD_NAMES: Final = tuple(field.name for field in dataclasses.fields(EngineParams))


def _json_object(name: str, value: object) -> dict[str, Any] | None:
    """The object a JSON parameter holds, given as text or already as a dict; None and blank text are no object."""
    if value is None:
        return None
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{name} must be a JSON object, not {fields.shown(value)}")
    return value or None


def refuse_what_is_not_built(params: EngineParams) -> None:
    """Refuse what was asked for and is not done here: the device first, then each feature by its name."""
    if params.device == "cuda":
        raise ModelLoadError("device 'cuda' is not available: no CUDA back end in this build; use device 'cpu' or 'auto'")
    for name in ("speculative_config", "kv_transfer_config"):
        if getattr(params, name) is not None:
            raise ModelLoadError(f"{name} is not built in this version; leave it unset")
    if params.scheduling_policy != "fcfs":
        raise ModelLoadError(f"scheduling_policy {params.scheduling_policy!r} is not built in this version; use 'fcfs'")
    if params.jump_forward:
        cause = "VT_ENABLE_JUMP_FORWARD asks for it" if env.switch("VT_ENABLE_JUMP_FORWARD") else "enable_jump_forward asks for it"
        raise ModelLoadError(f"jump-forward decoding is not built in this version and {cause}; turn it off")


def warn_of_variables_without_effect() -> None:
    """Say once of each variable that is set, and that nothing in this version asks for."""
    for row in env.ROWS.values():
        if not row.acts and env.raw(row.name) is not None:
            log.once(row.name, f"engine: warning: {row.name} is set and has no effect: no device of this version reads it")


def warn_of_what_sizes_nothing(params: EngineParams) -> None:
    """Say once that gpu_memory_utilization sizes nothing, when nothing else sizes the KV cache either.

    A C caller who never touched the field passes its default and is warned too: the struct cannot tell the two apart, and 0 opts out.
    """
    if params.gpu_memory_utilization > 0 and not params.num_blocks and params.kv_cache_memory_bytes is None:
        log.once(
            "gpu_memory_utilization",
            f"engine: warning: gpu_memory_utilization={params.gpu_memory_utilization:g} sizes nothing here: "
            "num_blocks or kv_cache_memory_bytes set the size of the KV cache (gpu_memory_utilization=0 silences this)",
        )
