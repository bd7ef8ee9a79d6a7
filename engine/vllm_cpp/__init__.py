"""vllm_cpp: run GGUF language models.

    import vllm_cpp

    with vllm_cpp.load("model.gguf") as model:
        print(model.generate("The capital of France is", max_tokens=16, temperature=0).text)

Owns: the public names. Must not import anything heavy: what needs numba is imported by `load`, not by `import vllm_cpp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_cpp.errors import (
    GenerationError,
    InternalError,
    InvalidArgumentError,
    ModelLoadError,
    UnknownKeywordError,
    VllmError,
)

if TYPE_CHECKING:
    from vllm_cpp.api import LLM, load, plan
    from vllm_cpp.config.sampling import SamplingParams
    from vllm_cpp.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "GenerationError",
    "InternalError",
    "InvalidArgumentError",
    "ModelLoadError",
    "SamplingParams",
    "Tokenizer",
    "UnknownKeywordError",
    "VllmError",
    "__version__",
    "load",
    "plan",
]

_LATE = {
    "LLM": "vllm_cpp.api",
    "load": "vllm_cpp.api",
    "plan": "vllm_cpp.api",
    "SamplingParams": "vllm_cpp.config.sampling",
    "Tokenizer": "vllm_cpp.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'vllm_cpp' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LATE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
