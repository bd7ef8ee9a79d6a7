"""Memory that kernels work on: zeroed, aligned to cache lines, addressed by int.

Owns allocation only. Every array here outlives the records that hold its address: keep a reference next to them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ALIGNMENT = 64


def aligned_zeros(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """A zeroed, C-contiguous array whose first byte stands on a 64-byte boundary. Pages are not touched, so unused room costs nothing."""
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(n_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + n_bytes].view(dtype).reshape(shape)
