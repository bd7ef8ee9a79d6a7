"""Stands in for `vllm_cpp.api.build_engine` inside a test's own prefix: `fails.gguf` is a model whose every third step fails.

Copied into that prefix beside a .pth file that imports it (some systems have a sitecustomize of their own); the product has no way to
ask for it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def fails_every_third(params: Any) -> Any:
    import fakes
    from fakes.models import Template
    from vllm_cpp.core import Engine

    runner = fakes.FakeRunner()

    def before_run(chunks: list[Any]) -> None:
        runner.steps = getattr(runner, "steps", 0) + 1
        if runner.steps % 3 == 0:
            raise RuntimeError("this step fails")

    runner.before_run = before_run
    return Engine(runner, fakes.FakeTokenizer(), params, Template())


class StandIn(importlib.abc.MetaPathFinder):
    """Finds vllm_cpp.api as usual, and replaces one function of it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != "vllm_cpp.api":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            real = module.build_engine
            module.build_engine = lambda params, *more: (
                fails_every_third(params) if params.model_path == "fails.gguf" else real(params, *more)
            )

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, StandIn())
