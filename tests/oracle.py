"""Recordings of llama.cpp, and how far an answer is from them.

Owns the reading of vectors/logits. Must not know how an answer was computed. Feed a recording's own tokens, not your argmax: one flipped
token spoils every row after it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tiny_models import FAMILIES, TinyModel, build
from vllm_cpp.models import supported

LOGITS = Path(__file__).parent / "vectors" / "logits"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny model with a recording. `used`: all its encodings have kernels."""

    name: str
    family: str
    seed: int
    size: int
    dtype: str
    used: bool
    encodings: tuple[str, ...]
    sha256: str

    @property
    def architecture(self) -> str:
        return FAMILIES[self.family][0]

    def model(self) -> TinyModel:
        return build(self.family, self.seed, self.size, self.dtype)


@cache
def cases() -> dict[str, Case]:
    """All cases by name."""
    rows = json.loads((LOGITS / "cases.json").read_text())
    return {row["name"]: Case(**{**row, "encodings": tuple(row["encodings"])}) for row in rows}


def used_cases() -> list[str]:
    """Cases of which every encoding has kernels and the architecture has a family."""
    runs = set(supported())
    return [name for name, case in cases().items() if case.used and case.architecture in runs]


def families() -> list[str]:
    """Families of the tiny models whose architecture can be run."""
    runs = set(supported())
    return sorted(name for name, (architecture, _) in FAMILIES.items() if architecture in runs)


def case_of(family: str, size: int = 0, dtype: str = "mix") -> str:
    """A family's case of that size and dtype, or in F32 where there is no such one."""
    found = [case for case in cases().values() if (case.family, case.size) == (family, size)]
    return min(found, key=lambda case: (case.dtype != dtype, case.dtype != "F32")).name


def sizes_of(family: str) -> list[int]:
    return sorted({case.size for case in cases().values() if case.family == family})


def one_case_a_size() -> list[str]:
    """Of each family and size one case, a quantized one where there is one."""
    return [case_of(family, size) for family in families() for size in sizes_of(family)]


def load(name: str) -> dict[str, Any]:
    """A case's recording; see vectors/logits/README.md for the arrays. `meta` is parsed."""
    with np.load(LOGITS / f"{name}.npz") as z:
        recording: dict[str, Any] = {key: z[key] for key in z.files}
    recording["meta"] = json.loads(str(recording["meta"]))
    return recording


def compare(recording: dict[str, Any], rows: np.ndarray, key: str = "logits") -> float:
    """Largest difference over largest recorded logit, between `rows` [n, vocab] and the first n recorded rows of `key`."""
    want = recording[key][: len(rows)]
    if rows.shape != want.shape:
        raise ValueError(f"rows {rows.shape}, recorded {want.shape}")
    return float(np.abs(rows - want).max() / np.abs(want).max()) if np.isfinite(rows).all() else float("inf")
