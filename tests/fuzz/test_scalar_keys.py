"""Models whose keys lie, planned and loaded in a child process with little memory.

Every whole number of a sound model is overwritten by extremes. Each such file loads, or is refused with a ModelLoadError that names a key
or a tensor: never for lack of memory, because nothing may be sized by a number that nothing has checked.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import oracle
from tiny_models.container import KINDS

ENGINE = Path(__file__).parents[2] / "engine"
CHILD = Path(__file__).with_name("load_child.py")
U32 = struct.pack("<I", KINDS["u32"][0])
EXTREMES = (0, 2**30, 2**31 - 1, 2**32 - 1)  # 2^30 also divides well


@pytest.mark.parametrize(
    "name",
    [
        "gemma4-s2-z0-F32", "gemma4-s7-z1-F32", "gpt-oss-s1-z0-F32", "mistral3-s1-z0-F32", "laguna-s2-z0-F32",
        "qwen2moe-s1-z0-F32", "llama-s1-z0-F32", "nemotron_h_moe-puzzle-s1-z0-F32", "granitehybrid-s2-z0-F32", "jamba-s1-z0-F32",
        "lfm2moe-s1-z0-F32", "deepseek2-s1-z0-F32", "deepseek2-kvb-s1-z0-F32", "deepseek4-s3-z0-F32", "qwen35moe-s2-z0-F32",
        "qwen3next-s1-z0-F32",
        "kimi-linear-s1-z0-F32", "bailingmoe3-s2-z0-F32", "bailingmoe2-s1-z0-F32", "granitemoe-s1-z0-F32",
    ],
)  # fmt: skip
def test_extreme_numbers_load_or_are_refused_by_name(tmp_path: Path, name: str) -> None:
    model = oracle.cases()[name].model()
    path = model.write(tmp_path / "0.gguf")  # a name that is no key: refusals hold it
    content = path.read_bytes()
    numbers = {key: stored for key, stored in model.kvs.items() if stored[:4] == U32 and len(stored) == 8}
    places = {key: content.index(struct.pack("<Q", len(key)) + key.encode() + stored) + 12 + len(key) for key, stored in numbers.items()}
    together = (f"{model.arch}.attention.key_length", f"{model.arch}.attention.value_length")  # one that differs is refused for that
    alone = [(key,) for key in places]
    edited = [(keys, extreme) for keys in [*alone, together] if places.keys() >= set(keys) for extreme in EXTREMES]
    edits = ["none"] + [f"{' and '.join(keys)} = {extreme}" for keys, extreme in edited]
    job = {
        "path": str(path),
        "keys_end": max(places.values()) + 4,
        "edits": [[(places[key], extreme) for key in keys] for keys, extreme in edited],
    }
    child = subprocess.run(
        [sys.executable, str(CHILD)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ENGINE)},
    )
    verdicts = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(verdicts) == len(edits), f"died at {edits[len(verdicts)]}: {child.stderr[-2000:]}"
    assert verdicts[0] == "ok"
    named = re.compile(r"^refused .*(key '|tensor '|[a-z]_(length|count)\b)", re.DOTALL)
    assert [(edit, v) for edit, v in zip(edits, verdicts, strict=True) if v != "ok" and not named.match(v)] == []
    assert 20 < sum(v != "ok" for v in verdicts) < len(verdicts) - 5  # both are common, or the edits miss
