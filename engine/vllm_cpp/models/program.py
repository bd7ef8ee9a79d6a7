"""A program: the flat list of operations that computes one step of a model.

Owns the list, its printed form and the int64 table that the thread team runs. Must not know what the operations mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.jit import Kernel


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a kernel on its record. `barrier`: all threads finish it before any starts the next."""

    kernel: Kernel
    record: np.ndarray
    label: str
    barrier: bool = True


class Program:
    """Operations in order. Records stay writable: an operation reads its record anew each time it runs."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def add(self, kernel: Kernel, record: np.ndarray, label: str, barrier: bool = True) -> np.ndarray:
        """Append an operation and return its record. Leave the barrier out only where the next operation reads nothing that this one writes
        and writes nothing that this one reads."""
        self.operations.append(Operation(kernel, record, label, barrier))
        return record

    def table(self) -> np.ndarray:
        """int64 [n_ops, 3] for `Team.run`; compiles (or loads from the cache) every kernel it names. The last operation always has a
        barrier."""
        table = aligned_zeros((len(self.operations), 3), np.int64)
        for row, operation in zip(table, self.operations, strict=True):
            row[:] = operation.kernel.address, operation.record.ctypes.data, operation.barrier
        table[-1, 2] = 1
        return table

    def __str__(self) -> str:
        return "\n".join(f"{i:5d} {o.kernel.name:16s} {o.label}{'' if o.barrier else '  ..'}" for i, o in enumerate(self.operations))
