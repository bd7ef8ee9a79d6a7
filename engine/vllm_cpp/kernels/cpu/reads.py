"""The read lanes: threads that fill slots from files.

Owns a lane's life, what a read does about short counts, interruptions, refusals and ends of files, and the touching of pages that reads
will go to. Must not know why a slice is wanted: slot and file stand in the store's records (`slots.py`).

A lane is compiled code that sleeps in the C library until a read is posted, so that neither waking nor reading needs Python's lock.
"""

from __future__ import annotations

from vllm_cpp.kernels import jit, libc, simd
from vllm_cpp.kernels.cpu import slots
from vllm_cpp.kernels.cpu.fields import field, index
from vllm_cpp.kernels.cpu.slots import ALIGNMENT


@jit.inner
def _direct(fd, to, start, n_bytes, wanted):  # type: ignore[no-untyped-def]
    """Read whole pages until `wanted` bytes are there. Bytes read; below 0 the negated errno if the first read was refused."""
    done = 0
    while done < wanted and done & (ALIGNMENT - 1) == 0:  # a count that ends inside a page is the file's end
        got = libc.pread(fd, to + done, n_bytes - done, start + done)
        if got > 0:
            done += got
        elif got == 0:
            break
        else:
            why = libc.errno()
            if why != libc.EINTR:
                return done if done > 0 else -why
    return done


@jit.inner
def _buffered(fd, to, start, n_bytes):  # type: ignore[no-untyped-def]
    """Read exactly n_bytes: READY, ENDED, or the negated errno."""
    done = 0
    while done < n_bytes:
        got = libc.pread(fd, to + done, n_bytes - done, start + done)
        if got > 0:
            done += got
        elif got == 0:
            return slots.ENDED
        else:
            why = libc.errno()
            if why != libc.EINTR:
                return -why
    return slots.READY


@jit.inner
def _fill(here, slot):  # type: ignore[no-untyped-def]
    """Read a slot's slice; the state the slot is in then."""
    record = slots.slot_at(here, slot)
    tower = field(record, slots.SLOT_TOWER)
    file, n_bytes = field(tower, slots.TOWER_FILE), field(tower, slots.TOWER_SLICE_BYTES)
    first = field(tower, slots.TOWER_OFFSET) + field(record, slots.SLOT_EXPERT) * n_bytes
    cell = field(here, slots.STORE_ARENA) + slot * field(here, slots.STORE_CELL_BYTES)
    in_page, done = first & (ALIGNMENT - 1), 0
    direct = field(file, slots.FILE_DIRECT_FD)
    if direct >= 0:
        whole = (in_page + n_bytes + ALIGNMENT - 1) & -ALIGNMENT
        got = _direct(direct, cell, first - in_page, whole, in_page + n_bytes)
        if got == -libc.EINVAL:  # opened, but not read: some file systems say no only here
            slots.put(file, slots.FILE_DIRECT_FD, -1)
        done = min(max(got - in_page, 0), n_bytes)
    return _buffered(field(file, slots.FILE_FD), cell + in_page + done, first + done, n_bytes - done)


@jit.inner
def _take_job(here):  # type: ignore[no-untyped-def]
    """The slot of the oldest posted read that nobody took. There is one: each post raised the semaphore by one."""
    while True:
        job = simd.atomic_load(here + 8 * slots.TAKEN)
        # Its place in the ring is not written again before it is taken: waiting reads are of different slots and have a place each.
        slot = index(field(here, slots.STORE_RING), job % field(here, slots.STORE_N_SLOTS))
        if simd.atomic_replace(here + 8 * slots.TAKEN, job, job + 1):
            return slot


@jit.inner
def _serve_one(here):  # type: ignore[no-untyped-def]
    slot = _take_job(here)
    record = slots.slot_at(here, slot)
    n_bytes = field(field(record, slots.SLOT_TOWER), slots.TOWER_SLICE_BYTES)
    state = _fill(here, slot)
    if state == slots.READY:
        slots.count(here, slots.BYTES, n_bytes)
    slots.end_read(here, slot, state)


@jit.function(1)
def serve_reads(here):  # type: ignore[no-untyped-def]
    """A lane's life: fill what is posted until told to stop."""
    while True:
        while libc.sem_wait(here + 8 * slots.SEMAPHORE) != 0:
            pass
        if simd.atomic_load(here + 8 * slots.STOP) != 0:
            return
        _serve_one(here)


@jit.function(2)
def stop_reads(here, n_lanes):  # type: ignore[no-untyped-def]
    """Let every lane's next look be its last."""
    simd.atomic_store(here + 8 * slots.STOP, 1)
    for _ in range(n_lanes):
        libc.sem_post(here + 8 * slots.SEMAPHORE)


@jit.function(2)
def touch_pages(address, n_bytes):  # type: ignore[no-untyped-def]
    """Let the system find memory for every page that begins within `n_bytes` from `address`, the start of one. Their content stays, though
    others write to it: a 0 is replaced by a 0, or nothing is."""
    for page in range(0, n_bytes, libc.PAGE):
        simd.atomic_replace(address + page, 0, 0)
