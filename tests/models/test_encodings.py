"""Every family in an encoding of each kind of activation, against its own reference lane."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import oracle
import tiny_models
from models.driving import blocks_for, runner
from vllm_cpp.config import offload
from vllm_cpp.config.offload.resolve import REFERENCE
from vllm_cpp.models import Runner
from vllm_cpp.scheduler.batch import Chunk

PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 300, 16)]


def every_position(loaded: Runner) -> np.ndarray:
    blocks = blocks_for(len(PROMPT))
    return np.stack([loaded.run([Chunk([token], i, blocks, True)])[0].copy() for i, token in enumerate(PROMPT)])


# Rows of size 0 fill blocks of 256 in most families; what does not fit an encoding is F16.
@pytest.mark.parametrize(("dtype", "size"), [("BF16", 1), ("MXFP4", 1), ("IQ2_S", 0)])
@pytest.mark.parametrize("family", oracle.families())
def test_most_positions_are_near_the_reference_lane(family: str, dtype: str, size: int, tmp_path: Path) -> None:
    """At some positions a rounded activation chooses another expert; a weight read wrongly spoils all of them."""
    path = tiny_models.build(family, 5, size, dtype).write(tmp_path / "tiny.gguf")
    with runner(path) as loaded:
        rows = every_position(loaded)
    with runner(path, residency=offload.Residency(expand=REFERENCE)) as loaded:
        exact = every_position(loaded)
    apart = np.abs(rows - exact).max(1) / np.abs(exact).max()
    assert np.median(apart) < 0.2
