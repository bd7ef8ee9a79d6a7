"""Memory that kernels work on: zeroed, aligned to cache lines, addressed by int.

Owns allocation only. Every array here outlives the records that hold its address: keep a reference next to them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from typing import Any

import numpy as np

ALIGNMENT = 64
_OWN_MAPPING_BYTES = 128 << 10
_LARGE_PAGES_BYTES = 4 << 20


def aligned_zeros(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """A zeroed, C-contiguous array whose first byte stands on a 64-byte boundary. Pages are not touched, so unused room costs nothing.
    MemoryError where there is no such room, however large the numbers."""
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes > sys.maxsize - ALIGNMENT:  # numpy would say that the dimensions are wrong
        raise MemoryError(f"{n_bytes} bytes for an array {shape} of {dtype}")
    if n_bytes >= _OWN_MAPPING_BYTES:
        return np.frombuffer(_mapped(n_bytes), np.uint8, n_bytes).view(dtype).reshape(shape)
    raw = np.zeros(n_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + n_bytes].view(dtype).reshape(shape)


def _mapped(n_bytes: int) -> mmap.mmap:
    """Memory of its own, which goes back to the system with the last array on it. The C library's allocator learns to keep what large
    blocks were freed, so that a process which loads and closes engines would hold on to memory of any size."""
    try:
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{n_bytes} bytes of memory: {error}") from error
    if n_bytes >= _LARGE_PAGES_BYTES:  # as numpy does
        with contextlib.suppress(OSError):  # a system without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
