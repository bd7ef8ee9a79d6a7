"""One file, opened and mapped read-only.

Owns the descriptor, the mapping, its address, and the file's identity as it was when opened (so that a later reader can notice that the
file under its feet is another one). Must not know what the bytes mean.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from dataclasses import dataclass

import numpy as np

from vllm_cpp.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Identity:
    """What must stay the same while a model is open."""

    device: int
    inode: int
    size: int
    mtime_ns: int


class MappedFile:
    """A regular file and its mapping. `view` and `address` are valid until close(); after it nothing may be read through either."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = _open(path)
        try:
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                raise ModelLoadError(f"{path}: not a regular file; a GGUF model has to be a file that can be mapped")
            if status.st_size == 0:
                raise ModelLoadError(f"{path}: the file is empty")
            self.identity = Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            self.size = status.st_size
            try:
                self._mapping = mmap.mmap(self.fd, self.size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelLoadError(f"{path}: cannot be mapped: {error}") from error
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._mapping)
        self._array = np.frombuffer(self._mapping, np.uint8)
        self.address: int = self._array.ctypes.data
        self.closed = False

    def bytes_at(self, offset: int, size: int) -> np.ndarray:
        """A read-only uint8 view into the mapping. It keeps the mapping alive for as long as somebody holds it, even past close()."""
        return self._array[offset : offset + size]

    def close(self) -> None:
        """Unmap and close. A view somebody still holds delays the unmapping until it goes, so it never dangles; plain addresses do."""
        if self.closed:
            return
        self.closed = True
        self.view.release()
        del self._array
        with contextlib.suppress(BufferError):  # held by a view from bytes_at(); the mapping goes with it
            self._mapping.close()
        os.close(self.fd)


def _open(path: str) -> int:
    # O_NONBLOCK: opening a named pipe must be refused, not waited on.
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise ModelLoadError(f"{path}: cannot be opened: {error}") from error
