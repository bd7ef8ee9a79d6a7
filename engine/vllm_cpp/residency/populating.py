"""Memory for the arena ahead of the slices that will stand in it.

Owns the thread that touches the arena's pages before a read needs them, how far ahead it goes, and when it stops. Must not know which
slices there are, nor what is read.

A page that is touched for the first time has to be found and zeroed, and where the machine is a virtual one, often to be fetched from its
host: that was measured to take longer than reading the slice from the drive. Inside a read it is waited for, ahead of it hardly ever.
Pages are touched, not asked for (MADV_POPULATE_WRITE): that holds a lock which every mapping of the process waits for, and loads took
seconds longer.
"""

from __future__ import annotations

import signal
import threading
from typing import Final

from vllm_cpp.kernels.cpu import reads
from vllm_cpp.residency.memory import available_bytes
from vllm_cpp.residency.slots import SlotStore

AHEAD_BYTES: Final = 1 << 30
"""At most so much beyond the slots in use is kept ready: some prompts' worth, and nothing against an arena that may never be filled."""
STEPS_AHEAD: Final = 8
"""And, once steps have shown what they take, no more than for so many of them, or a stretch of slots and a piece: decoding that takes few
keeps its cores to itself."""
PIECE_BYTES: Final = 32 << 20
SPARED_BYTES: Final = 128 << 20
"""Of available memory: where there is less, pages are left to the slices that really come."""


class Populating:
    """The arena's pages, from the first on, a little ahead of the slots in use; a thread of its own does it until `close`."""

    def __init__(self, store: SlotStore, num_slices: int) -> None:
        """`num_slices` there are to fill slots with: memory of more slots than that would be looked for in vain. Should another model bring
        more, its reads bring their pages themselves."""
        self._store = store
        self._end = store.taken_bytes(num_slices)
        self._reached = 0  # bytes of the arena that are, or are just being, populated, or are left to reads
        self._lock = threading.Lock()
        self._wanted, self._closed = threading.Event(), False
        self._first_step = True
        self._most, self._pace = 0, 0  # slots that were ever in use when a step ended; how many steps add, half of it forgotten with each
        self._ahead = AHEAD_BYTES
        reads.touch_pages.address  # noqa: B018 - compile now, not beside the first step
        room = available_bytes()
        self._refused = room is not None and self._end > room
        self._thread = threading.Thread(target=self._serve, name="vllm-populate", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread to be had: reads bring their pages themselves
            self._refused = True

    @property
    def held_bytes(self) -> int:
        """Bytes of the arena that have their memory, or are just getting it: what a look at available memory has subtracted already. Slots
        that a closed model left empty keep theirs."""
        return max(self._reached, self._most * self._store.cell_bytes, self._store.occupied * self._store.cell_bytes)

    @property
    def over(self) -> bool:
        """Whether nothing is left to be done."""
        return self._refused or self._closed or self._due()[0] >= self._end

    def end_step(self) -> None:
        """Slots may have been taken: let the thread catch up. The first step also helps it, and ends when it is ahead: the tokens that
        follow would wait for the same pages one by one, on cores that have less time for them."""
        first_step, self._first_step = self._first_step, False
        self._follow_pace(first_step)
        if not self._thread.is_alive():
            return
        if self.over or self._due()[1] > 0:
            self._wanted.set()
        if first_step:
            self._catch_up()

    def _follow_pace(self, first_step: bool) -> None:
        """Behind the first step be ahead by what some steps like the last ones take, whichever engine's they were."""
        with self._lock:
            before, self._most = self._most, max(self._most, self._store.occupied)
            self._pace = max(self._most - before, self._pace // 2)
            if not first_step:
                least = self._store.taken_bytes(1) + PIECE_BYTES  # or the next stretch would be the reads' before it is this thread's
                self._ahead = min(AHEAD_BYTES, max(least, STEPS_AHEAD * self._pace * self._store.cell_bytes))

    def close(self) -> None:
        """Stop and join the thread."""
        self._closed = True
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the host's signals stay on the host's threads
        while not self.over:
            self._wanted.clear()
            self._catch_up()
            if not self.over:
                self._wanted.wait()

    def _catch_up(self) -> None:
        """Populate piece by piece until enough is ahead."""
        while (piece := self._next_piece()) is not None:
            reads.touch_pages(*piece)

    def _next_piece(self) -> tuple[int, int] | None:
        """(address, bytes), nobody else's; None while enough is ahead, or when this is over. Where reads have overtaken, it goes on behind
        the slots they are filling."""
        with self._lock:
            if self.over:
                return None
            first, n_bytes = self._due()
            if n_bytes <= 0:
                return None
            room = available_bytes()
            if room is not None and room < n_bytes + SPARED_BYTES:
                self._refused = True
                return None
            self._reached = first + n_bytes
            return self._store.arena_address + first, n_bytes

    def _due(self) -> tuple[int, int]:
        """Where in the arena the next piece begins, and its bytes: a whole one, or the last; 0 while enough is ahead."""
        store = self._store
        used = store.occupied
        first = max(self._reached, store.taken_bytes(used))
        n_bytes = min(PIECE_BYTES, self._end - first)
        return first, n_bytes if first + n_bytes <= used * store.cell_bytes + self._ahead else 0
