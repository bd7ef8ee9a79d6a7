"""How a kernel is compiled, cached on disk and called.

Owns every numba option in the library, the shapes of compiled functions (see the four decorators), and the kernel cache, whose files are
named by the hash of the sources behind a kernel (`sources.py`). Must not know what any kernel computes.

A decorated function is not compiled until its `.address` is asked for, so only the encodings a file holds cost anything. All four kinds are
C functions over int64 (addresses in bytes, counts): they can be stored in a table and called from compiled code (`call_op` and its
siblings) or, with the GIL released, from Python by calling the kernel itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from vllm_cpp import env, log
from vllm_cpp.kernels import sources

# The one place that names numba options. numpy's error model: no Python exception can be raised from a kernel (division by zero is inf or
# nan).
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}


@lru_cache(maxsize=1)
def cache_root() -> Path:
    """The folder compiled kernels are kept in: VLLM_CPP_CACHE_DIR, else the user's cache folder; a private temporary folder, said once,
    where that cannot be written (kernels are then compiled again by the next process)."""
    asked = env.text("VLLM_CPP_CACHE_DIR")
    wanted = Path(asked) if asked else Path(env.text("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_cpp"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=wanted).close()
    except OSError as why:
        fallback = Path(tempfile.mkdtemp(prefix="vllm_cpp-"))
        log.once(
            "kernel-cache",
            f"kernels: cannot write the cache folder {wanted} ({why.strerror}); compiled kernels go to {fallback} and are "
            "not kept. Set VLLM_CPP_CACHE_DIR to a writable folder.",
        )
        return fallback
    return wanted


class _Locator(_CacheLocator):
    """Names a kernel's cache files by the hash of all sources it is made from, not by its own file's time stamp."""

    def __init__(self, py_func: Callable[..., Any]):
        self._name = f"{py_func.__module__}.{py_func.__qualname__}"
        self._sources = sources.hash_of(py_func.__module__)

    def get_cache_path(self) -> str:
        return str(cache_root() / "kernels")

    def get_source_stamp(self) -> str:
        return self._sources

    def get_disambiguator(self) -> str:
        return hashlib.sha256(f"{self._name} {self._sources}".encode()).hexdigest()[:16]

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator | None:  # noqa: ARG003 - numba passes both
        self = cls(py_func)
        try:
            self.ensure_cache_path()
        except OSError:
            return None
        return self


class _CacheImpl(CompileResultCacheImpl):
    _locator_classes = (_Locator,)

    def check_cachable(self, cres: Any) -> bool:
        # numba refuses functions with constant addresses baked in; ours take every address as an argument.
        return not cres.lifted


class _KernelCache(FunctionCache):
    _impl_class = _CacheImpl


class Kernel:
    """One compiled C function over int64 arguments; compiled, or loaded from the cache, when its address is first asked for.

    Calling it from Python passes plain ints and releases the GIL while it runs.
    """

    def __init__(self, py_func: Callable[..., Any], n_args: int):
        self.name = py_func.__name__
        self.python = py_func
        self.n_args = n_args
        self._compiled: CFunc | None = None
        self._call: Any = None
        self._lock = threading.Lock()

    def _compile(self) -> CFunc:
        with self._lock:
            if self._compiled is None:
                signature = (types.int64,) * self.n_args, types.void
                fresh = CFunc(self.python, signature, {}, dict(_OPTIONS))
                fresh._cache = _KernelCache(self.python)
                if not _cached(fresh):
                    log.once(
                        "kernel-compile", "kernels: compiling for this machine (the first run only; later runs load them from the cache)"
                    )
                fresh.compile()
                self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self.n_args)(fresh.address)
                self._compiled = fresh
        return self._compiled

    @property
    def address(self) -> int:
        """Address of the C function, for tables and for `call_*`."""
        return (self._compiled or self._compile()).address

    @property
    def from_cache(self) -> bool:
        """Whether the code came from the disk cache."""
        return (self._compiled or self._compile()).cache_hits > 0

    def inspect_llvm(self) -> str:
        return (self._compiled or self._compile()).inspect_llvm()

    def __call__(self, *args: int) -> None:
        if self._call is None:
            self._compile()
        self._call(*args)

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"


def _cached(kernel: CFunc) -> bool:
    """Whether the disk cache holds this kernel for this CPU (index look-up only)."""
    cache = kernel._cache
    key = cache._index_key(kernel._sig, kernel._targetdescr.target_context.codegen())
    return key in cache._cache_file._load_index()


def op(py_func: Callable[..., Any]) -> Kernel:
    """An operation of a program: `op(args, tid, nth)`. `args` is the address of its int64 record; thread `tid` of `nth` does its share."""
    return Kernel(py_func, 3)


def row_kernel(py_func: Callable[..., Any]) -> Kernel:
    """`rows(w, stride, n_rows, k, act, out)`: out f32[n_rows] = weight rows (k values each, `stride` bytes apart) times one activation
    row."""
    return Kernel(py_func, 6)


def tile_kernel(py_func: Callable[..., Any]) -> Kernel:
    """`tile(w, stride, n_rows, k, acts, n_acts, outs, scratch)`: the same for n_acts activation rows; `acts` and `outs` are int64 tables of
    addresses."""
    return Kernel(py_func, 8)


def decode_kernel(py_func: Callable[..., Any]) -> Kernel:
    """`decode(w, k, out)`: one weight row to f32[k]."""
    return Kernel(py_func, 3)


def function(n_args: int) -> Callable[[Callable[..., Any]], Kernel]:
    """Any other C function over `n_args` int64 arguments."""
    return lambda py_func: Kernel(py_func, n_args)


def inner(py_func: Callable[..., Any]) -> Any:
    """A helper called inside kernels; always inlined, never compiled by itself."""
    return njit(**_OPTIONS, forceinline=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)(py_func)


def helper(py_func: Callable[..., Any]) -> Any:
    """A helper called inside kernels that the compiler may leave as a call (large bodies, several call sites)."""
    return njit(**_OPTIONS, no_cfunc_wrapper=True, no_cpython_wrapper=True)(py_func)


def _caller(n_args: int, name: str) -> Any:
    def typed(_context: Any, _address: Any, *args: Any) -> Any:
        if len(args) != n_args:
            return None
        signature = types.void(types.int64, *[types.int64] * n_args)

        def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            i64 = ir.IntType(64)
            kind = ir.FunctionType(ir.VoidType(), [i64] * n_args)
            builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
            return context.get_dummy_value()

        return signature, codegen

    names = ", ".join(f"a{i}" for i in range(n_args))
    scope = {"typed": typed}
    # An intrinsic must have a fixed number of arguments, so its signature is written out.
    exec(f"def {name}(typingctx, address, {names}):\n    return typed(typingctx, address, {names})\n", scope)
    return intrinsic(scope[name])


# Inside kernels: call a compiled function by its address.
call_op = _caller(3, "call_op")
call_rows = _caller(6, "call_rows")
call_tile = _caller(8, "call_tile")
call_decode = _caller(3, "call_decode")
