"""Recordings of what llama.cpp embeds: vectors/embeddings, read.

Owns the cases and their models. Must not know how an answer was computed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tiny_models.embedding_families import build
from tiny_models.model import TinyModel

FOLDER = Path(__file__).parent / "vectors" / "embeddings"


@cache
def _listed() -> dict[str, Any]:
    return json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))


def texts() -> list[str]:
    return _listed()["texts"]


def cases() -> dict[str, dict[str, Any]]:
    return {case["name"]: case for case in _listed()["cases"]}


def model(name: str) -> TinyModel:
    case = cases()[name]
    return build(case["family"], case["seed"], case["size"], case["dtype"])


class Recording:
    """The ids of all texts, and the vectors of those that have any, brought to length 1."""

    def __init__(self, name: str) -> None:
        with np.load(FOLDER / f"{name}.npz") as z:
            ends = np.cumsum(z["lengths"])
            self.ids = [ids.tolist() for ids in np.split(z["ids"], ends[:-1])]
            self.values = _unit(z["values"])
            self.exact = _unit(z["exact"]) if "exact" in z else None


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
