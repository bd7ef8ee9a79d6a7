"""The maker of tiny models makes the models that were recorded, and the recordings are what their README says."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import oracle
from tiny_models import FAMILIES
from tiny_models.container import file_bytes
from vllm_cpp.quants import by_id


@pytest.mark.parametrize("name", oracle.cases())
def test_model_is_the_recorded_one(name: str) -> None:
    case = oracle.cases()[name]
    model = case.model()
    assert hashlib.sha256(file_bytes(model.kvs, model.tensors)).hexdigest() == case.sha256 == oracle.load(name)["meta"]["sha256"]
    assert {by_id(tensor.ggml_id).name for tensor in model.tensors.values()} == set(case.encodings)


def test_every_family_and_size_has_a_float_and_a_mixed_case() -> None:
    """A draft block adds nothing to what is computed, so one case of a file that has one is enough."""
    have = {(case.family, case.size, case.dtype) for case in oracle.cases().values() if case.used}
    for family in FAMILIES:
        dtypes = ("F32",) if family.endswith("-nextn") else ("F32", "mix")
        assert have >= {(family, size, dtype) for size in (0, 1) for dtype in dtypes}


@pytest.mark.parametrize("name", oracle.cases())
def test_recording_is_whole(name: str) -> None:
    z = oracle.load(name)
    n = len(z["generated"])
    assert z["logits"].shape == (n, 320)
    assert (z["logits"].argmax(1) == z["generated"]).all()
    assert oracle.compare(z, z["logits"]) == 0
    if "prompt_logits" in z:
        assert (z["prompt_logits"][-1] == z["logits"][0]).all()
    elif "exact" not in z:
        assert len(z["prompt"]) > 200
    else:
        assert oracle.compare(z, z["exact"]) == pytest.approx(z["meta"]["exact_diff"], abs=1e-6)
    if "experts" in z:
        assert len(z["experts"]) == len(z["margin"]) == len(z["prompt"]) + n - 1


def test_compare_sees_a_difference() -> None:
    z = oracle.load("llama-s1-z0-F32")
    rows = z["logits"][:3].copy()
    rows[1, 5] += 0.5
    assert oracle.compare(z, rows) == pytest.approx(0.5 / np.abs(z["logits"][:3]).max())
    rows[0, 0] = np.nan
    assert oracle.compare(z, rows) == float("inf")
    with pytest.raises(ValueError, match="rows"):
        oracle.compare(z, rows[:, :-1])


def test_a_model_is_made_once(tiny_model) -> None:
    path = tiny_model("llama-s1-z0-F32")
    made = path.stat().st_mtime_ns
    assert tiny_model("llama-s1-z0-F32").stat().st_mtime_ns == made
