"""The SPMD team: every worker thread runs the same table of operations, with barriers between.

Owns worker threads, the barrier and how workers wait between jobs (spin briefly, then sleep, so that an idle engine uses no CPU). Must
not know what an operation does.

A job is one table: int64[n_ops, 3], (address of a compiled op, address of its record, 1 if all threads must be done before the next op
starts). Instead of 1, the address of a repeat record makes the job go back to an earlier entry, once all are done, as long as a cell of it
is set. Workers are Python threads that spend their lives inside `serve`, with the GIL released. They sleep in the C library, so that
neither falling asleep nor waking needs the GIL, which another thread of the host may hold for long. The caller of `run` is worker 0.
"""

from __future__ import annotations

import signal
import threading

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.kernels import jit, libc, simd
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.simd import i64, load, store

# The control record, int64s a cache line (8 words) apart so that spinning on one does not slow writes to another.
_GENERATION, _ARRIVED, _BARRIER, _TABLE, _COUNT, _STOP, _BEDS = 0, 8, 16, 24, 25, 26, 32
# Behind it a line for each worker: 1 while it sleeps or is about to, and the semaphore it sleeps on.
_ASLEEP, _SEMAPHORE = 0, 1
_BED_WORDS = -(-(1 + libc.SEMAPHORE_WORDS) // 8) * 8

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


@jit.inner
def _bed(control, tid):  # type: ignore[no-untyped-def]
    return control + 8 * (_BEDS + _BED_WORDS * tid)


@jit.inner
def _announce(control, nth):  # type: ignore[no-untyped-def]
    """Publish the job that stands in the control record, and wake who sleeps. Who sees the new generation sees all that was written
    before."""
    simd.atomic_add(control + 8 * _GENERATION, 1)
    for tid in range(1, nth):
        bed = _bed(control, tid)
        if simd.atomic_load(bed + 8 * _ASLEEP) != 0 and simd.atomic_replace(bed + 8 * _ASLEEP, 1, 0):
            libc.sem_post(bed + 8 * _SEMAPHORE)


@jit.inner
def _sleep(control, tid, seen):  # type: ignore[no-untyped-def]
    """Sleep until a generation other than `seen` is announced.

    Either `_announce` sees the flag, or this sees the new generation: its look adds 0, so whichever of the two additions to the generation
    comes second sees all that stood before the first.
    """
    bed = _bed(control, tid)
    simd.atomic_add(bed + 8 * _ASLEEP, 1)
    if simd.atomic_add(control + 8 * _GENERATION, 0) != seen and simd.atomic_replace(bed + 8 * _ASLEEP, 1, 0):
        return
    while libc.sem_wait(bed + 8 * _SEMAPHORE) != 0:  # a signal came between
        pass


@jit.function(2)
def prepare(control, nth):  # type: ignore[no-untyped-def]
    """Make the beds; before any worker starts."""
    for tid in range(nth):
        libc.sem_init(_bed(control, tid) + 8 * _SEMAPHORE, 0)


@jit.function(2)
def lead(control, nth):  # type: ignore[no-untyped-def]
    """Announce the job that stands in the control record, and do worker 0's share of it."""
    if nth > 1:
        _announce(control, nth)
    _run_table(control, 0, nth)


@jit.function(2)
def dismiss(control, nth):  # type: ignore[no-untyped-def]
    """Let every worker return."""
    store(control + 8 * _STOP, 1)
    _announce(control, nth)


@jit.function(3)
def serve(control, tid, nth):  # type: ignore[no-untyped-def]
    """A worker's life: run every job that is announced, until told to stop."""
    seen, idle = 0, 0
    while True:
        generation = simd.atomic_load(control + 8 * _GENERATION)
        if generation != seen:
            if load(i64, control + 8 * _STOP) != 0:
                return
            seen = generation
            _run_table(control, tid, nth)
            idle = 0
        elif idle < _SPINS_BEFORE_YIELD + _SPINS_BEFORE_SLEEP:
            idle += 1
            if idle > _SPINS_BEFORE_YIELD:
                simd.sched_yield()
            else:
                simd.pause()
        else:
            _sleep(control, tid, seen)
            idle = 0


class Team:
    """`size` threads, the caller of `run` included."""

    def __init__(self, size: int):
        """ModelLoadError where the system gives no thread for a worker; those that started have ended then."""
        if size < 1:
            raise ValueError(f"a team needs at least one thread, not {size}")
        self.size = size
        self._control = aligned_zeros(_BEDS + _BED_WORDS * size, np.int64)
        self._address = self._control.ctypes.data
        self._table: np.ndarray | None = None  # that stands in the control record
        lead.address, serve.address, dismiss.address  # noqa: B018 - compile now, before any thread waits for another
        prepare(self._address, size)
        self._threads: list[threading.Thread] = []
        for tid in range(1, size):
            thread = threading.Thread(target=self._worker, args=(tid,), name=f"vllm-worker-{tid}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                raise ModelLoadError(
                    f"no thread for worker {tid} of {size - 1}: {error}; lower threads or VLLM_CPP_CPU_THREADS, {size} now"
                ) from error
            self._threads.append(thread)

    def _worker(self, tid: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the host's signals stay on the host's threads
        serve(self._address, tid, self.size)

    def run(self, table: np.ndarray) -> None:
        """Run `table`, int64 [n_ops, 3] whose last entry has a barrier, on every thread; returns when all operations are done. One caller
        at a time."""
        if table is not self._table:
            self._table = table
            self._control[_TABLE] = table.ctypes.data
            self._control[_COUNT] = len(table)
        lead(self._address, self.size)

    def close(self) -> None:
        """Stop and join the workers. Safe twice."""
        dismiss(self._address, self.size)
        for thread in self._threads:
            thread.join()
        self._threads = []
