"""The SPMD team: every worker thread runs the same table of operations, with barriers between.

Owns worker threads, the barrier and how workers wait between jobs (spin briefly, then sleep on a lock, so that an idle engine uses no CPU).
Must not know what an operation does.

A job is one table: int64[n_ops, 3], (address of a compiled op, address of its record, 1 if all threads must be done before the next op
starts). Instead of 1, the address of a repeat record makes the job go back to an earlier entry, once all are done, as long as a cell of it
is set. Workers are Python threads that spend their lives inside `serve`, with the GIL released; one takes the GIL only to fall asleep. The
caller of `run` is worker 0.
"""

from __future__ import annotations

import signal
import threading

import numpy as np

from vllm_cpp.kernels import jit, simd
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.simd import i64, load, store

# The control record, int64s a cache line (8 words) apart so that spinning on one does not slow writes to another.
_GENERATION, _ARRIVED, _BARRIER, _TABLE, _COUNT, _STOP, _ASLEEP = 0, 8, 16, 24, 25, 26, 32

REPEAT_FIELDS = (
    "cell",  # address of the int64 that is not 0 while the entries have to be run again; written by an earlier one of them
    "back",  # entries to go back from the one that follows
)
_REPEAT_CELL, _REPEAT_BACK = range(len(REPEAT_FIELDS))

_SPINS_BEFORE_YIELD = 200  # some microseconds: the next thread is late because it computes, or because it lacks a core
_SPINS_BEFORE_SLEEP = 4000  # yields; about a millisecond or two of waiting for the next job before a worker sleeps


@jit.inner
def _barrier(control, nth):  # type: ignore[no-untyped-def]
    """All `nth` threads arrive before any leaves. Spins, then yields the core (an oversubscribed machine must not collapse)."""
    if nth > 1:
        generation = simd.atomic_load(control + 8 * _BARRIER)
        if simd.atomic_add(control + 8 * _ARRIVED, 1) == nth - 1:
            simd.atomic_store(control + 8 * _ARRIVED, 0)
            simd.atomic_store(control + 8 * _BARRIER, generation + 1)
        else:
            spins = 0
            while simd.atomic_load(control + 8 * _BARRIER) == generation:
                spins += 1
                if spins > _SPINS_BEFORE_YIELD:
                    simd.sched_yield()
                else:
                    simd.pause()


@jit.inner
def _run_table(control, tid, nth):  # type: ignore[no-untyped-def]
    table = load(i64, control + 8 * _TABLE)
    count = load(i64, control + 8 * _COUNT)
    i = 0
    while i < count:
        entry = table + 24 * i
        jit.call_op(load(i64, entry), load(i64, entry + 8), tid, nth)
        i += 1
        after = load(i64, entry + 16)
        if after == 1:
            _barrier(control, nth)
        elif after != 0:
            # Read before the barrier: behind it the entry that is gone back to may already write the cell anew.
            again = load(i64, load(i64, after + 8 * _REPEAT_CELL))
            _barrier(control, nth)
            if again != 0:
                i -= load(i64, after + 8 * _REPEAT_BACK)


@jit.function(1)
def announce(control):  # type: ignore[no-untyped-def]
    """Publish the job that stands in the control record: everything written before is seen by who sees the new generation."""
    simd.atomic_add(control + 8 * _GENERATION, 1)


@jit.op
def lead(control, tid, nth):  # type: ignore[no-untyped-def]
    """Worker 0's share of the job that stands in the control record."""
    _run_table(control, tid, nth)


@jit.function(4)
def serve(control, tid, nth, seen):  # type: ignore[no-untyped-def]
    """A worker's life between two sleeps: run every job whose generation differs from the last one seen (int64 at `seen`); return after a
    spell without work, or when told to stop."""
    idle = 0
    while idle < _SPINS_BEFORE_YIELD + _SPINS_BEFORE_SLEEP:
        generation = simd.atomic_load(control + 8 * _GENERATION)
        if generation != load(i64, seen):
            if load(i64, control + 8 * _STOP) != 0:
                return
            store(seen, generation)
            _run_table(control, tid, nth)
            idle = 0
        else:
            idle += 1
            if idle > _SPINS_BEFORE_YIELD:
                simd.sched_yield()
            else:
                simd.pause()


class Team:
    """`size` threads, the caller of `run` included."""

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"a team needs at least one thread, not {size}")
        self.size = size
        self._control = aligned_zeros(_ASLEEP + 8 * size, np.int64)
        self._address = self._control.ctypes.data
        self._seen = aligned_zeros(8 * size, np.int64)
        self._wake = [threading.Semaphore(0) for _ in range(size)]
        lead.address, serve.address, announce.address  # noqa: B018 - compile now, before any thread waits for another
        self._threads = [
            threading.Thread(target=self._worker, args=(tid,), name=f"vllm-worker-{tid}", daemon=True) for tid in range(1, size)
        ]
        for thread in self._threads:
            thread.start()

    def _worker(self, tid: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the host's signals stay on the host's threads
        seen = self._seen[8 * tid : 8 * tid + 1]
        asleep = _ASLEEP + 8 * tid
        while not self._control[_STOP]:
            serve(self._address, tid, self.size, seen.ctypes.data)
            # Going to sleep and being woken both happen under the GIL: either `run` sees the flag, or this sees the new generation.
            self._control[asleep] = 1
            if self._control[_GENERATION] == seen[0] and not self._control[_STOP]:
                self._wake[tid].acquire()
            self._control[asleep] = 0

    def _announce(self) -> None:
        announce(self._address)
        for tid in range(1, self.size):
            if self._control[_ASLEEP + 8 * tid]:
                self._control[_ASLEEP + 8 * tid] = 0
                self._wake[tid].release()

    def run(self, table: np.ndarray) -> None:
        """Run `table`, int64 [n_ops, 3] whose last entry has a barrier, on every thread; returns when all operations are done. One caller
        at a time."""
        self._control[_TABLE] = table.ctypes.data
        self._control[_COUNT] = len(table)
        if self.size > 1:
            self._announce()
        lead(self._address, 0, self.size)

    def close(self) -> None:
        """Stop and join the workers. Safe twice."""
        self._control[_STOP] = 1
        self._announce()
        for thread in self._threads:
            thread.join()
        self._threads = []
