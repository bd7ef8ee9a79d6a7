"""Kernels for processors that are not here: they compile to object code with the instructions they were written for, and call nothing
that a just-in-time compiler cannot find (LLVM ends the process then). What is only compiled here was not run; test_lanes.py runs others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.targets import TARGETS

ROOT = Path(__file__).parent.parent.parent
# In the C library of every system, or in numba's own (`numba_`, `NRT_`, and Python's, for the errors that no kernel raises).
THERE = ("memset", "memcpy", "memmove", "numba_", "NRT_", "Py")
Q4_1, Q8_0 = (["encodings.q4_1.rows", "encodings.q4_1.tile"], ["encodings.q8_0.rows", "encodings.q8_0.tile"])
INTEGER = Q4_1 + Q8_0
F16 = ["encodings.f16.rows", "panel.product_f16", "panel.product_key_bytes"]
ELF_MACHINE = {"x86": 62, "aarch64": 183}
# by target: the vector registers, and instructions that the kernels of a group are made of
EXPECTED: dict[str, tuple[set[str], list[tuple[list[str], set[str]]]]] = {
    "x86-64": ({"xmm"}, [(Q4_1, {"pmaddwd"}), (Q8_0, {"pmullw"}), (F16, {"mulps"})]),
    "x86-64-v3": ({"xmm", "ymm"}, [(INTEGER, {"vpmaddubsw", "vpmaddwd"}), (F16, {"vcvtph2ps", "vfmaddps"})]),
    "x86-64-v4 with VNNI": ({"xmm", "ymm", "zmm"}, [(INTEGER, {"vpdpbusd"}), (F16, {"vcvtph2ps", "vfmaddps"})]),
    "neoverse-n1": (set(), [(INTEGER, {"sdot"}), (F16, {"fcvtl", "fmla"})]),
    "apple-m1": (set(), [(INTEGER, {"sdot"}), (F16, {"fcvtl", "fmla"})]),
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "engine"), str(ROOT / "tests")])
    programs = {
        target: subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.targets", target],
            env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for target in TARGETS
    }  # fmt: skip
    outputs = {target: program.communicate() for target, program in programs.items()}
    for target, program in programs.items():
        assert program.returncode == 0, f"{target}: {outputs[target][1]}"
    return {target: json.loads(out) for target, (out, _) in outputs.items()}


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_become_object_code_that_stands_alone(compiled, target):
    machine = ELF_MACHINE["aarch64" if "aarch64" in TARGETS[target][0] else "x86"]
    for name, kernel in compiled[target].items():
        header = bytes.fromhex(kernel["object"])
        assert header[:4] == b"\x7fELF", name
        assert int.from_bytes(header[18:20], "little") == machine, name
        assert [call for call in kernel["calls"] if not call.startswith(THERE)] == [], name


@pytest.mark.parametrize("target", TARGETS)
def test_the_instructions_are_those_of_the_target(compiled, target):
    registers, groups = EXPECTED[target]
    assert {width for kernel in compiled[target].values() for width in kernel["registers"]} == registers
    for names, operations in groups:
        for name in names:
            assert operations <= set(compiled[target][name]["operations"]), name
