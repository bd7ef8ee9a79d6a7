"""What the kernels answer on the instruction sets that numba is told to use, for test_lanes.py to compare.

Run as a program, with the file to write (and `decode` for the decode kernels too): numba's target is fixed at start by NUMBA_CPU_NAME
and NUMBA_CPU_FEATURES, so each lane needs a process of its own. Weights end where readable memory ends, so a kernel that reads past a
row ends the program; the last line printed says which one.
"""

from __future__ import annotations

import importlib
import sys

import numpy as np
from numba import njit

from tests.kernels.encodings import LastBytes, activation, run_rows, run_tile, weights
from vllm_cpp.kernels import simd
from vllm_cpp.kernels.cpu.registry import NAMES
from vllm_cpp.quants import ENCODINGS

# One of each way that tiles lower: 16-bit sums of 8, 4 or 1 products, signed bytes, one scale or two, sub-blocks of 16 or 32, floats,
# halves of blocks, points of a table.
TILES = ("F16", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q6_K", "IQ4_XS", "NVFP4", "IQ2_S")
N_ROWS, N_ACTS = 18, 5


@njit
def dots(u, s, x, out):
    simd.store(out, simd.dot_u8(simd.load(simd.i32x16, out), simd.load(simd.u8x64, u), simd.load(simd.i8x64, s)))
    simd.store(out + 64, simd.dot_i8(simd.load(simd.i32x16, out + 64), simd.load(simd.i8x64, x), simd.load(simd.i8x64, s)))
    simd.store(out + 128, simd.dot_u8(simd.zero(simd.i32x8), simd.load(simd.u8x32, u), simd.load(simd.i8x32, s)))
    simd.store(out + 160, simd.dot_i8(simd.zero(simd.i32x8), simd.load(simd.i8x32, x), simd.load(simd.i8x32, s)))
    simd.store(out + 192, simd.dot_i16(simd.load(simd.i32x16, out + 192), simd.load(simd.i16x32, x), simd.load(simd.i16x32, s)))
    simd.store(out + 256, simd.pair_sums(simd.load(simd.u8x64, u), simd.load(simd.i8x64, s)))


@njit
def halves(bits, wide, narrow):
    for i in range(0, 65536, 8):
        x = simd.load_half(simd.f32x8, bits + 2 * i)
        simd.store(wide + 4 * i, x)
        simd.store_half(narrow + 2 * i, simd.load(simd.f32x8, wide + 4 * i) * 1.0003)


@njit
def exps(x, out, n):
    for i in range(0, n, 16):
        simd.store(out + 4 * i, simd.exp(simd.load(simd.f32x16, x + 4 * i)))


def simd_answers(rng: np.random.Generator) -> dict[str, np.ndarray]:
    u = rng.choice(np.array([0, 1, 126, 127], np.uint8), 64)
    s, x = (rng.choice(np.array([-127, -1, 0, 1, 127], np.int8), 64) for _ in range(2))
    out = rng.integers(-1000, 1000, 80, np.int32)
    dots(u.ctypes.data, s.ctypes.data, x.ctypes.data, out.ctypes.data)
    bits = np.arange(65536, dtype=np.uint16)
    bits = np.where((bits & 0x7C00) == 0x7C00, bits | 0x200 * ((bits & 0x3FF) != 0), bits).astype(np.uint16)  # quiet NaN only
    wide, narrow = np.zeros(65536, np.float32), np.zeros(65536, np.uint16)
    halves(bits.ctypes.data, wide.ctypes.data, narrow.ctypes.data)
    nan = np.isnan(wide)
    domain = np.linspace(-106, 88, 4096).astype(np.float32)
    powers = np.zeros(4096, np.float32)
    exps(domain.ctypes.data, powers.ctypes.data, 4096)
    return {"dots": out, "half to float": wide[~nan].view(np.uint32), "float to half": narrow[~nan], "exp": powers}


def main(path: str, decode: bool) -> None:
    rng = np.random.default_rng(5)
    answers = simd_answers(rng)
    for encoding in NAMES:
        print(encoding, flush=True)
        kernels = importlib.import_module(f"vllm_cpp.kernels.cpu.encodings.{encoding.lower()}")
        for k in {1: (70,), 32: (96, 160), 64: (64, 192), 128: (256,), 256: (512,)}[ENCODINGS[encoding].block_values]:
            w = weights(encoding, N_ROWS, k, rng)
            acts = [activation(encoding, rng.standard_normal(k).astype(np.float32)) for _ in range(N_ACTS)]
            memory = LastBytes(w)
            each = [run_rows(kernels, memory.address, w.shape[1], N_ROWS, k, act) for act in acts]
            answers[f"{encoding} rows of {k}"] = np.array(each)
            if encoding in TILES:
                answers[f"{encoding} tile of {k}"] = run_tile(kernels, memory.address, w.shape[1], N_ROWS, k, acts)
            if decode:
                decoded = np.zeros(k, np.float32)
                kernels.decode(memory.address + w.shape[1] * (N_ROWS - 1), k, decoded.ctypes.data)
                answers[f"{encoding} decode of {k}"] = decoded
    np.savez(path, **answers)


if __name__ == "__main__":
    main(sys.argv[1], decode="decode" in sys.argv[2:])
