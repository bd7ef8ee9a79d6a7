"""A whole fake model behind the Python door: what `api.build_engine` answers with, without a file."""

from __future__ import annotations

from typing import Any

from fakes import VOCAB_SIZE, FakeRunner, FakeTokenizer
from vllm_cpp import api
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.core import Engine


class Tokenizer(FakeTokenizer):
    """The fake tokenizer with decoding, as the Python door needs it."""

    vocab_size = VOCAB_SIZE

    def decode(self, ids: list[int], skip_special: bool = False) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")


class Template:
    """Renders roles and contents one after the other."""

    def render(self, messages: list[dict[str, Any]], tools: Any = None, add_generation_prompt: bool = True, **_: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


class Runner(FakeRunner):
    def stats(self) -> dict[str, Any]:
        about = {"architecture": "fake", "encoding_bytes": {"Q4_K": 3 << 20, "F32": 1 << 19}, "weights": "in memory", "device": "cpu"}
        return {**about, "max_model_len": self.max_model_len}


def build(params: EngineParams, progress: Any = None, **runner: Any) -> Engine:
    """An engine over the fake model."""
    if progress is not None:
        progress("preparing the kernels", 0.5)
    return Engine(Runner(max_model_len=params.max_model_len or 512, **runner), Tokenizer(), params, Template())


def install() -> None:
    """Make every `load` of this process load the fake model."""
    api.build_engine = build
