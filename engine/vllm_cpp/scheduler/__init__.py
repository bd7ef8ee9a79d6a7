"""Which tokens run in the next step, and where their keys and values live.

Owns: the order of requests, the KV block pool, prefix hashes and the batch of a step. Must not know tensors, texts, sampling or threads: it
handles token ids and block numbers only, and one thread calls it.
"""

from .batch import Batch, Chunk
from .blocks import BlockPool
from .scheduler import Scheduler
from .sequence import Sequence

__all__ = ["Batch", "BlockPool", "Chunk", "Scheduler", "Sequence"]
