"""The lanes: threads that read slices into slots.

Owns the threads. Must not know what they do: a lane's life is compiled (`kernels/cpu/reads.py`).
"""

from __future__ import annotations

import signal
import threading

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.kernels.cpu import reads
from vllm_cpp.residency.slots import SlotStore


class Lanes:
    """`count` threads that fill the store's slots until `close`."""

    def __init__(self, store: SlotStore, count: int) -> None:
        """ModelLoadError where the system gives no thread for a lane; those that started have ended then."""
        if count < 1:
            raise ValueError(f"a store needs at least one lane, not {count}")
        self.count = count
        self._store = store
        reads.serve_reads.address, reads.stop_reads.address  # noqa: B018 - compile now, before anybody waits for a read
        self.threads: list[threading.Thread] = []
        for number in range(count):
            thread = threading.Thread(target=self._serve, name=f"vllm-lane-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                raise ModelLoadError(
                    f"no thread for read lane {number + 1} of {count}: {error}; lower VT_MOE_EXPERT_STREAM_LANES or the number of threads"
                ) from error
            self.threads.append(thread)

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the host's signals stay on the host's threads
        reads.serve_reads(self._store.address)

    def close(self) -> None:
        """Stop and join the threads. Nothing may be posted any more."""
        reads.stop_reads(self._store.address, len(self.threads))
        for thread in self.threads:
            thread.join()
