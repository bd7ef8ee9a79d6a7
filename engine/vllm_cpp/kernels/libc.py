"""The few functions of the C library that compiled kernels call: reading files, waking a reader, hints about mapped pages.

Owns their signatures. Must not know who reads what. Each is called by its symbol, as `simd.sched_yield` is, so compiled code that the disk
cache returns finds them again in the next process.
"""

from __future__ import annotations

import mmap
import platform

from llvmlite import ir
from numba.core import cgutils

from vllm_cpp.kernels.simd import convert, i32, i64, load, stack_bytes, store
from vllm_cpp.kernels.vectors import Value, builder, coerce, unrolled

_INT, _LONG = ir.IntType(32), ir.IntType(64)
EINTR, EINVAL = 4, 22
SEEK_END = 2
MADV_WILLNEED = 3
PAGE = mmap.PAGESIZE
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # private to the process
_CLOCK_MONOTONIC = 1
SEMAPHORE_WORDS = 4
"""int64 words of a semaphore: glibc's sem_t is 32 bytes on 64-bit machines, other libraries' are smaller."""


def _call(name: str, returns: ir.Type, *args: ir.Value) -> Value:
    b = builder()
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(returns, [a.type for a in args]), name)
    result = Value(i32 if returns is _INT else i64, b.call(function, args))
    return convert(i64, result) if returns is _INT else result


def _int(x: object) -> ir.Value:
    return convert(i32, coerce(x, i64)).ir


def _long(x: object) -> ir.Value:
    return coerce(x, i64).ir


@unrolled
def pread(fd: Value, to: Value, count: Value, offset: Value) -> Value:
    """Bytes read, 0 at the end of the file, -1 with `errno` set."""
    return _call("pread", _LONG, _int(fd), _long(to), _long(count), _long(offset))


@unrolled
def file_size(fd: Value) -> Value:
    """Where the file ends now, or -1. Moves the descriptor's position, which positional reads do not care about."""
    return _call("lseek", _LONG, _int(fd), _long(0), _int(SEEK_END))


@unrolled
def errno() -> Value:
    """Why the last call of this thread failed."""
    b = builder()
    where = _call("__errno_location", _LONG)
    return convert(i64, Value(i32, b.load(b.inttoptr(where.ir, _INT.as_pointer()))))


@unrolled
def madvise(address: Value, count: Value, advice: Value) -> Value:
    """0, or -1. `address` must be the start of a page."""
    return _call("madvise", _INT, _long(address), _long(count), _int(advice))


@unrolled
def sem_init(semaphore: Value, value: Value) -> Value:
    return _call("sem_init", _INT, _long(semaphore), _int(0), _int(value))


@unrolled
def sem_post(semaphore: Value) -> Value:
    return _call("sem_post", _INT, _long(semaphore))


@unrolled
def sem_wait(semaphore: Value) -> Value:
    """0 when the count could be lowered; -1 when a signal came between."""
    return _call("sem_wait", _INT, _long(semaphore))


@unrolled
def nanoseconds() -> Value:
    """Of the clock that only goes forward."""
    now = stack_bytes(16)
    _call("clock_gettime", _INT, _int(_CLOCK_MONOTONIC), _long(now))
    return load(i64, now) * 1_000_000_000 + load(i64, now + 8)


def _futex(address: Value, operation: int, value: Value, timeout: ir.Value) -> None:
    b = builder()
    kind = ir.FunctionType(_LONG, [_LONG], var_arg=True)
    function = cgutils.get_or_insert_function(b.module, kind, "syscall")
    b.call(function, [_LONG(_FUTEX), _long(address), _LONG(operation), _long(value), timeout, _LONG(0), _LONG(0)])


@unrolled
def wait_while(address: Value, value: Value, microseconds: int) -> None:
    """Sleep while the int32 at `address` is `value`, until `wake_all` or the time is over; may return early. Yields where nobody can be
    woken."""
    if _FUTEX is None:
        _call("sched_yield", _INT)
        return
    timeout = stack_bytes(16)
    store(timeout, coerce(0, i64))
    store(timeout + 8, coerce(microseconds, i64) * 1000)
    _futex(address, _FUTEX_WAIT, value, timeout.ir)


@unrolled
def wake_all(address: Value) -> None:
    """Wake every thread that waits at `address`."""
    if _FUTEX is not None:
        _futex(address, _FUTEX_WAKE, coerce(1 << 30, i64), _LONG(0))
