"""The address of every kept weight: in the file's mapping (borrowed), or in a copy of our own.

Weights are copied when mapping is off. Beside streamed experts all but towers are copied too: they are a small part of such a file, other
reads keep pushing mapped pages out of the page cache, and a file that shrinks under the mapping would end the process.

Owns: the copies, the tally, and reading the borrowed bytes in ahead of use, which is done only while they fit in available memory: a
checkpoint larger than memory would evict its own first pages while faulting in its last. Must not know which tensors a family keeps or
what computes with them: it is asked tensor by tensor.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Set
from typing import Final

import numpy as np

from vllm_cpp import log
from vllm_cpp.config.offload import Residency
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file.model import GGUFModel, TensorInfo
from vllm_cpp.residency.inventory import weight_of
from vllm_cpp.residency.memory import available_bytes, take

Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0 to 1."""

_MADV_WILLNEED: Final = 3
_MADV_POPULATE_READ: Final = 22  # Linux 5.14: map and read in, and say so when that fails
_PAGE: Final = mmap.PAGESIZE
_STRIDE: Final = 64 << 20  # bytes read in between two reports of progress
_READING: Final = "reading weights"


class Weights:
    """Addresses of the kept weights of one model. Everything it gave out is valid until `close`, and no longer than the model is open."""

    def __init__(self, model: GGUFModel, residency: Residency, streamed: Set[str] = frozenset()) -> None:
        """`streamed`: tensors that are read through slots; their address is in the mapping, for whoever finds no slot."""
        self._model = model
        self._streamed = streamed
        room = available_bytes()
        self.exceed_memory = room is not None and sum(tensor.n_bytes for tensor in model.tensors.values()) > room
        self._borrows = residency.mmap
        self._prefault = residency.prefault
        self._spans: list[tuple[int, int]] = []  # borrowed: address, bytes
        self._copies: dict[str, mmap.mmap] = {}
        self._addresses: dict[str, int] = {}
        self.borrowed_bytes = 0
        self.copied_bytes = 0

    def address(self, tensor: TensorInfo) -> int:
        """Where the tensor's first byte is. Asking twice gives the same address."""
        if tensor.name in self._streamed:
            return tensor.address
        known = self._addresses.get(tensor.name)
        if known is None:
            borrows = self._borrows and not (self._streamed and not weight_of(tensor).num_experts)
            known = self._addresses[tensor.name] = self._borrow(tensor) if borrows else self._copy(tensor)
        return known

    def _borrow(self, tensor: TensorInfo) -> int:
        self._spans.append((tensor.address, tensor.n_bytes))
        self.borrowed_bytes += tensor.n_bytes
        return tensor.address

    def _copy(self, tensor: TensorInfo) -> int:
        """Read the tensor from the file, not through the mapping, whose pages would then count as ours as well."""
        shard = self._model.shards[tensor.shard]
        try:
            memory = take(tensor.n_bytes)
        except OSError as error:
            raise ModelLoadError(f"{shard.path}: no memory for tensor '{tensor.name}' ({tensor.n_bytes} bytes): {error}") from error
        with memoryview(memory) as whole:
            done = 0
            while done < tensor.n_bytes:
                with whole[done : tensor.n_bytes] as rest:
                    count = os.preadv(shard.fd, [rest], tensor.file_offset + done)
                if count == 0:
                    raise ModelLoadError(f"{shard.path}: the file ends inside tensor '{tensor.name}': it changed while it was being read")
                done += count
        self._copies[tensor.name] = memory
        self.copied_bytes += tensor.n_bytes
        return int(np.frombuffer(memory, np.uint8).ctypes.data)

    def prefault(self, progress: Progress | None = None) -> int:
        """Read the borrowed bytes in, if that is wanted and they fit; say how many bytes were read in."""
        if self._prefault is False or not self._spans:
            return 0
        room = available_bytes()
        if room is not None and self.borrowed_bytes > room:
            if self._prefault:  # asked for by name, so its absence is said
                log.line(f"engine: weight residency: prefault skipped, {self.borrowed_bytes} borrowed bytes exceed the {room} available")
            return 0
        return _read_in(self._spans, progress)

    def close(self) -> None:
        """Release the copies. Safe to call twice."""
        self._addresses.clear()
        self._spans.clear()
        for memory in self._copies.values():
            memory.close()
        self._copies.clear()


def _read_in(spans: list[tuple[int, int]], progress: Progress | None) -> int:
    total = sum(size for _, size in spans)
    done = 0
    for address, size in sorted(spans):
        for start in range(address, address + size, _STRIDE):
            length = min(_STRIDE, address + size - start)
            if not _advise(start, length):
                return done
            done += length
            if progress is not None:
                progress(_READING, done / total)
    return done


_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _advise(address: int, size: int) -> bool:
    """Read pages in; False when the kernel would not. A read error surfaces at first use, where it can name what was read."""
    first = address & ~(_PAGE - 1)
    length = address + size - first
    if _madvise(first, length, _MADV_POPULATE_READ) == 0:
        return True
    if ctypes.get_errno() != errno.EINVAL:
        return False
    return _madvise(first, length, _MADV_WILLNEED) == 0  # an older kernel: start the reads, wait for none
