"""Every lane (native, 256-bit VNNI, AVX2, generic) answers alike: integers and conversions to the bit, products too where there is FMA;
those of encodings without blocks, which are added in vectors as wide as registers are, where these are as wide."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llvmlite.binding import get_host_cpu_features

from tests.kernels.probe import TILES
from vllm_cpp.kernels import simd
from vllm_cpp.kernels.cpu.registry import NAMES

ROOT = Path(__file__).parent.parent.parent
AVX2 = "+sse2,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+f16c,+fma,+bmi,+bmi2,+avx2"
X86 = {"native": None, "avxvnni": ("x86-64-v3", AVX2 + ",+avxvnni"), "avx2": ("x86-64-v3", AVX2), "generic": ("x86-64", "+sse2")}
LANES = X86 if platform.machine() == "x86_64" else {"native": None, "generic": ("generic", "")}
FUSED = {"native", "avxvnni", "avx2"}
WITHOUT_BLOCKS = ("F64", "F32", "F16", "BF16")


def this_cpu_has(lane: tuple[str, str] | None) -> bool:
    have = get_host_cpu_features()
    return lane is None or all(have.get(flag[1:], False) for flag in lane[1].split(",") if flag)


RUNNABLE = {name: lane for name, lane in LANES.items() if this_cpu_has(lane)}
NARROW = [name for name in RUNNABLE if name in FUSED and not (name == "native" and simd.wide_registers())]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("lanes")
    running = {}
    for name, lane in RUNNABLE.items():
        chosen = {"NUMBA_CPU_NAME": lane[0], "NUMBA_CPU_FEATURES": lane[1]} if lane else {}
        path = os.pathsep.join([str(ROOT), str(ROOT / "engine"), str(ROOT / "tests")])
        command = [sys.executable, "-m", "tests.kernels.probe", str(folder / name), *([] if lane else ["decode"])]
        environment = os.environ | chosen | {"PYTHONPATH": path}
        running[name] = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    outputs = {name: process.communicate()[0] for name, process in running.items()}
    for name, process in running.items():
        assert process.returncode == 0, f"lane {name} ended with {process.returncode} after:\n{outputs[name]}"
    return {name: dict(np.load(f"{folder / name}.npz")) for name in RUNNABLE}


def keys_of(what: str, answers: dict[str, dict[str, np.ndarray]]) -> list[str]:
    keys = [key for key in answers["native"] if key.split(" rows")[0].split(" tile")[0] == what]
    assert keys
    return keys


@pytest.mark.parametrize("lane", [name for name in RUNNABLE if name != "native"])
@pytest.mark.parametrize("what", ["dots", "half to float", "float to half", "exp", *NAMES])
def test_lanes_answer_alike(answers, lane, what):
    like, same_bits = "native", lane in FUSED
    if what in ("dots", "half to float", "float to half"):
        same_bits = True
    elif what in WITHOUT_BLOCKS and lane in NARROW:
        like, same_bits = (NARROW[0], True) if lane != NARROW[0] else ("native", False)
    for key in keys_of(what, answers):
        one, other = answers[like][key], answers[lane][key]
        if same_bits:
            np.testing.assert_array_equal(other, one, f"{lane} and {like}: {key}")
        else:
            np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6 * np.abs(one).max(), err_msg=f"{lane} and {like}: {key}")


@pytest.mark.parametrize("encoding", TILES)
def test_a_tile_is_rows_bit_for_bit_in_every_lane(answers, encoding):
    for lane, answer in answers.items():
        for key in [key for key in answer if key.startswith(f"{encoding} tile")]:
            np.testing.assert_array_equal(answer[key], answer[key.replace("tile", "rows")], f"{lane}: {key}")
