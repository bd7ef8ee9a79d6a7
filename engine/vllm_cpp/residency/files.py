"""A model file as the read lanes see it.

Owns two descriptors of its own on the very file the model has open: one for reads through the page cache, one for direct reads where the
file system has them. Must not know what is in the file.
"""

from __future__ import annotations

import os

from vllm_cpp.kernels.cpu import slots as kernel
from vllm_cpp.kernels.records import pack


class OpenFile:
    """`address` is that of its record. A direct read that is refused puts -1 there for good."""

    def __init__(self, path: str, fd: int, *, direct: bool) -> None:
        self.path = path
        self._fd = os.dup(fd)
        self._direct_fd = _reopened_direct(fd) if direct else -1
        self.record = pack(kernel.FILE_FIELDS, fd=self._fd, direct_fd=self._direct_fd)

    @property
    def address(self) -> int:
        return int(self.record.ctypes.data)

    @property
    def reads_directly(self) -> bool:
        return bool(self.record[kernel.FILE_DIRECT_FD] >= 0)

    @property
    def size(self) -> int:
        """Where the file ends now."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """No read may be under way."""
        os.close(self._fd)
        if self._direct_fd >= 0:
            os.close(self._direct_fd)


def _reopened_direct(fd: int) -> int:
    # Through /proc it is the same file whatever its name has become; the flag belongs to a new open file, so the other descriptor keeps the
    # cache.
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return -1
