"""Where compiled kernels are kept between processes.

Owns the folder, the names of the files in it (by the hash of the sources behind a kernel, `sources.py`), and the rule that these files are
a help and never a need: one that is damaged, or that cannot be written, costs a compilation and a line on stderr, and nothing fails. Must
not know how a kernel is compiled.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import pwd
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, NullCache, _Cache, _CacheLocator

from vllm_cpp import env, log
from vllm_cpp.kernels import sources

KEPT_DAYS = 30
"""Files that nobody loaded for this long are removed: every version of the library leaves some behind."""
_DAY_S = 86400.0
_WAY_OUT = "Set VLLM_CPP_CACHE_DIR to a writable folder with room in it."


def root() -> Path | None:
    """The folder compiled kernels are kept in: VLLM_CPP_CACHE_DIR, else the user's cache folder, else, said once, one in the temporary
    folder; None where even that cannot be written."""
    asked = env.text("VLLM_CPP_CACHE_DIR")
    if asked:
        return _usable(Path(asked))
    caches = env.text("XDG_CACHE_HOME")
    home = None if caches else _home()
    return _usable(Path(caches) / "vllm_cpp" if caches else home / ".cache" / "vllm_cpp" if home else None)


def _home() -> Path | None:
    """The user's home; None for a user id that the system does not know, as containers have them."""
    home = env.text("HOME")
    if home:
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


@lru_cache
def _usable(wanted: Path | None) -> Path | None:
    why = f"HOME is not set, and the system does not know user id {os.getuid()}"
    if wanted is not None:
        try:
            wanted.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=wanted).close()
            return wanted
        except (OSError, ValueError) as error:
            why = f"cannot write the cache folder {wanted} ({_reason(error)})"
    try:
        other = _temporary()
    except OSError as error:
        log.once("kernel-cache", f"kernels: {why}, nor a temporary one ({_reason(error)}); compiled kernels are not kept. {_WAY_OUT}")
        return None
    log.once("kernel-cache", f"kernels: {why}; compiled kernels go to {other}, as long as that lasts. {_WAY_OUT}")
    return other


def _temporary() -> Path:
    """This user's own folder, the same in every process: what is loaded from it is run, so nobody else may write there."""
    path = Path(tempfile.gettempdir(), f"vllm_cpp-{os.getuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(0, f"{path} is not a folder that only this user may enter")
    tempfile.TemporaryFile(dir=path).close()
    return path


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"


def of(py_func: Callable[..., Any]) -> _Cache:
    """The cache of one kernel."""
    folder = root()
    return NullCache() if folder is None else _KernelCache(py_func, folder / "kernels")


class _Locator(_CacheLocator):
    """Names a kernel's cache files by the hash of all sources it is made from, not by its own file's time stamp."""

    def __init__(self, py_func: Callable[..., Any]):
        self._name = f"{py_func.__module__}.{py_func.__qualname__}"
        self._sources = sources.hash_of(py_func.__module__)
        self.folder = ""  # known to the cache, which asks for a name first

    def get_cache_path(self) -> str:
        return self.folder

    def get_source_stamp(self) -> str:
        return self._sources

    def get_disambiguator(self) -> str:
        return hashlib.sha256(f"{self._name} {self._sources}".encode()).hexdigest()[:16]

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:  # noqa: ARG003 - numba passes both
        return cls(py_func)


class _CacheImpl(CompileResultCacheImpl):
    _locator_classes = (_Locator,)

    def check_cachable(self, cres: Any) -> bool:
        # numba refuses functions with constant addresses baked in; ours take every address as an argument.
        return not cres.lifted


class _Files(IndexDataCacheFile):
    """numba's index and data files, with a checksum before the data: a flipped bit in machine code would be run, not noticed."""

    def _save_data(self, name: str, data: Any) -> None:
        content = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(hashlib.sha256(content).digest() + content)

    def _load_data(self, name: str) -> Any:
        content = Path(self._data_path(name)).read_bytes()
        checksum, content = content[:32], content[32:]
        if hashlib.sha256(content).digest() != checksum:
            raise pickle.UnpicklingError(f"{name} does not hold what was written")
        return pickle.loads(content)

    def paths(self) -> Iterator[Path]:
        """The index, and the data of every signature and machine."""
        index = Path(self._index_path)
        yield index
        yield from (path for path in index.parent.iterdir() if path.name.startswith(index.stem + ".") and path.suffix == ".nbc")

    def used(self) -> None:
        """Note the day, for `prune`."""
        with suppress(OSError):
            if Path(self._index_path).stat().st_mtime < time.time() - _DAY_S:
                for path in self.paths():
                    os.utime(path)

    def discard(self) -> None:
        with suppress(OSError):
            for path in list(self.paths()):
                path.unlink(missing_ok=True)


class _KernelCache(FunctionCache):
    _impl_class = _CacheImpl

    def __init__(self, py_func: Callable[..., Any], folder: Path):
        super().__init__(py_func)
        locator = self._impl.locator
        self._cache_path = locator.folder = str(folder)
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            loaded = super().load_overload(sig, target_context)
        except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything, and whatever it is, the kernel can be compiled
            log.once("kernel-damaged", f"kernels: cannot use a file in {self._cache_path} ({_reason(error)}); compiling that kernel again")
            self._cache_file.discard()
            loaded = None
        if loaded is None:
            log.once("kernel-compile", "kernels: compiling for this machine (the first run only; later runs load them from the cache)")
        else:
            self._cache_file.used()
        return loaded

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
            prune(Path(self._cache_path))
        except Exception as error:  # noqa: BLE001 - as above: it is compiled, and will be again
            why = f"cannot write to {self._cache_path} ({_reason(error)})"
            log.once("kernel-save", f"kernels: {why}; what was compiled is not kept. {_WAY_OUT}")


@lru_cache
def prune(folder: Path) -> None:
    """Remove what nobody loaded for KEPT_DAYS, and what an interrupted write left. Once a process, and only in one that compiles."""
    oldest = time.time() - KEPT_DAYS * _DAY_S
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # another process prunes too
                if ((".nbi" in entry.name) or (".nbc" in entry.name)) and entry.stat(follow_symlinks=False).st_mtime < oldest:
                    Path(entry.path).unlink()
