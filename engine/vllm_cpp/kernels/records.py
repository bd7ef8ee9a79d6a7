"""The int64 records that operations read their arguments from.

Owns the packing of named fields. Must not know any operation's fields: each op's module lists its own, in order. What changes from step to
step stands in cells of its own, whose addresses are in the records.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_cpp.kernels.buffers import aligned_zeros


def pack(fields: tuple[str, ...], **values: Any) -> np.ndarray:
    """An int64 record holding `values` in the order of `fields`; floats as the bits of a float64. Every field must be given, and no
    other."""
    if set(fields) != set(values):
        missing, unknown = sorted(set(fields) - set(values)), sorted(set(values) - set(fields))
        raise TypeError(f"record fields are {', '.join(fields)}; missing {missing}, unknown {unknown}")
    record = aligned_zeros(len(fields), np.int64)
    for i, name in enumerate(fields):
        value = values[name]
        record[i] = np.float64(value).view(np.int64) if isinstance(value, float) else int(value)
    return record
