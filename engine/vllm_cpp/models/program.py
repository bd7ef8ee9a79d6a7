"""A program: the flat list of operations that computes one step of a model.

Owns the list, its printed form and the int64 table that the thread team runs. Must not know what the operations mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu import team
from vllm_cpp.kernels.jit import Kernel
from vllm_cpp.kernels.records import pack


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a kernel on its record. `barrier`: all threads finish it before any starts the next. `repeat`: a record that says when to
    go back to an earlier operation, and how far."""

    kernel: Kernel
    record: np.ndarray
    label: str
    barrier: bool = True
    repeat: np.ndarray | None = None


class Program:
    """Operations in order. Records stay writable: an operation reads its record anew each time it runs."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def add(self, kernel: Kernel, record: np.ndarray, label: str, barrier: bool = True) -> np.ndarray:
        """Append an operation and return its record. Leave the barrier out only where the next operation reads nothing that this one writes
        and writes nothing that this one reads."""
        self.operations.append(Operation(kernel, record, label, barrier))
        return record

    def repeat_from(self, first: int, cell: int) -> None:
        """Let the operations from number `first` to the last one run again as long as the int64 at address `cell` is not 0; an earlier one
        of them sets it. They must not be the end of the program."""
        last = self.operations.pop()
        self.operations.append(
            replace(last, barrier=True, repeat=pack(team.REPEAT_FIELDS, cell=cell, back=len(self.operations) + 1 - first))
        )

    def table(self) -> np.ndarray:
        """int64 [num_ops, 3] for `Team.run`; compiles (or loads from the cache) every kernel it names. The last operation always has a
        barrier."""
        table = aligned_zeros((len(self.operations), 3), np.int64)
        for row, operation in zip(table, self.operations, strict=True):
            after = operation.barrier if operation.repeat is None else operation.repeat.ctypes.data
            row[:] = operation.kernel.address, operation.record.ctypes.data, after
        table[-1, 2] = 1
        return table

    def __str__(self) -> str:
        return "\n".join(f"{i:5d} {o.kernel.name:16s} {o.label}{_after(o)}" for i, o in enumerate(self.operations))


def _after(operation: Operation) -> str:
    if operation.repeat is not None:
        return f"  again from {operation.repeat[team.REPEAT_FIELDS.index('back')] - 1} before, while it is asked for"
    return "" if operation.barrier else "  .."
