"""Which architectures can be run, and what each family is able to do.

Owns the table from `general.architecture` to a family. Must not know how a family computes: the family files register themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_cpp.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. `describe(builder, hyper_parameters)` appends its operations; the flags are capabilities that configuration asks
    about."""

    architecture: str
    describe: Callable[[Any, Any], None]
    streams_experts: bool = False  # routed experts are read through the slot seam
    places_experts: bool = False  # routed experts of a layer can be computed on another device than the rest
    consults_weight_offloader: bool = False


_FAMILIES: dict[str, Family] = {}


def family(architecture: str, **capabilities: bool) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    """Register the decorated `describe` under an architecture name."""

    def register(describe: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        _FAMILIES[architecture] = Family(architecture, describe, **capabilities)
        return describe

    return register


def supported() -> list[str]:
    """Architectures this build can run, sorted."""
    from vllm_cpp.models import families  # noqa: F401 - importing them registers them

    return sorted(_FAMILIES)


def find(architecture: str) -> Family:
    """The family of an architecture; ModelLoadError naming it and all supported ones."""
    names = supported()
    if architecture not in _FAMILIES:
        raise ModelLoadError(f"architecture {architecture!r} is not supported; this build runs {', '.join(names)}")
    return _FAMILIES[architecture]
