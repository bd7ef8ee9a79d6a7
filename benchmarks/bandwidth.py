"""How fast this machine's memory can be read: what every figure of a decoder stands beside, since each token reads all active weights once.

Owns one measurement: threads that add up a buffer no cache holds, asking for lines ahead as the kernels do. Must not know models.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.simd import i32x16

BUFFER_BYTES = 512 << 20
PASSES = 4
_AHEAD = 4096
_STEP = 256


@jit.function(3)
def read(address, n_bytes, out):  # type: ignore[no-untyped-def]
    """Add up n_bytes (a multiple of 256) as i32x16, in four running sums."""
    a, b, c, d = simd.zero(i32x16), simd.zero(i32x16), simd.zero(i32x16), simd.zero(i32x16)
    for at in range(address, address + n_bytes, _STEP):
        for line in range(0, _STEP, 64):
            simd.prefetch(at + _AHEAD + line)
        a = a + simd.load(i32x16, at)
        b = b + simd.load(i32x16, at + 64)
        c = c + simd.load(i32x16, at + 128)
        d = d + simd.load(i32x16, at + 192)
    simd.store(out, (a + b) + (c + d))


def read_gb_s(threads: int, n_bytes: int = BUFFER_BYTES) -> float:
    """The best of a few passes over `n_bytes`, in GB/s (10**9 bytes)."""
    buffer, outs = aligned_zeros(n_bytes, np.uint8), aligned_zeros((threads, 16), np.int32)
    buffer[::4096] = 1  # pages that nobody wrote are all one page of zeros
    share = n_bytes // threads // _STEP * _STEP
    read(buffer.ctypes.data, share, outs.ctypes.data)
    best = 0.0
    for _ in range(PASSES):
        jobs = [threading.Thread(target=read, args=(buffer.ctypes.data + share * i, share, outs[i].ctypes.data)) for i in range(threads)]
        start = time.perf_counter()
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        best = max(best, share * threads / (time.perf_counter() - start) / 1e9)
    return best
