"""How a kernel is compiled and called.

Owns every numba option in the library, and the shapes of compiled functions (see the four decorators). Must not know what any kernel
computes, nor where compiled ones are kept (`cache.py`).

A decorated function is not compiled until its `.address` is asked for, so only the encodings a file holds cost anything. All four kinds are
C functions over int64 (addresses in bytes, counts): they can be stored in a table and called from compiled code (`call_op` and its
siblings) or, with the GIL released, from Python by calling the kernel itself.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from vllm_cpp.kernels import cache

# The one place that names numba options. numpy's error model: no Python exception can be raised from a kernel (division by zero is inf or
# nan).
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}


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
                fresh._cache = cache.of(self.python)
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
