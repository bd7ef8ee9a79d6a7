"""Continuous batching with chunked prefill: which tokens of which sequences run next.

Owns: first come, first served; the token budget of a step; admission; preemption by recomputation; when a block may enter the prefix cache.
Must not know what a token means, when a sequence ends, or how a step is computed.

Two invariants carry the design. (1) `running` is in order of arrival, and everything in it arrived before everything in `waiting`:
admission takes the head of `waiting`, preemption takes the tail of `running` back to that head. (2) At most one running sequence has more
than one token pending, and it is the last: whoever is admitted after it would need budget that it had left over. So one walk over `running`
serves decodes first, and a preempted sequence, being the youngest, is never one that this step has already chosen.
"""

from __future__ import annotations

from collections import deque

from . import prefix
from .batch import Batch, Chunk
from .blocks import BlockPool
from .sequence import Place, Sequence


class Scheduler:
    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, enable_prefix_caching: bool = True,
        whole_prompts: bool = False,
    ) -> None:  # fmt: skip
        """`whole_prompts`: all tokens of a prompt in one step; none has more than max_num_batched_tokens."""
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        # Every running sequence must be able to decode in one step, or the walk below would starve the last ones.
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        self.enable_prefix_caching = enable_prefix_caching
        self.whole_prompts = whole_prompts
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._state_ids = list(range(max_num_seqs - 1, -1, -1))  # a stack of the free ones
        self.num_preemptions = 0
        self.num_prefix_queried_tokens = 0
        self.num_prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits the pool when it is alone in it."""
        return self._blocks_for(num_tokens) <= self.pool.num_blocks

    def add(self, sequence: Sequence) -> None:
        sequence.place = Place.WAITING
        self.waiting.append(sequence)

    def append(self, sequence: Sequence, token_id: int) -> None:
        """The sequence goes on with this token."""
        sequence.tokens.append(token_id)

    def finish(self, sequence: Sequence) -> None:
        """The sequence ends, running or waiting, and gives its blocks back; one that was refused has ended already."""
        if sequence.place is Place.RUNNING:
            self.running.remove(sequence)
            self._state_ids.append(sequence.state_id)
            self.pool.release(sequence.forget_blocks())
        elif sequence.place is Place.WAITING:
            self.waiting.remove(sequence)
        sequence.place = Place.NOWHERE

    def schedule(self) -> Batch:
        """Choose the tokens of the next step and give them blocks. With work to do, the batch has chunks or refusals."""
        batch = Batch()
        budget = self.max_num_batched_tokens
        preemptions = self.num_preemptions
        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            count = min(sequence.num_pending, budget)
            if self._make_room(sequence, count, batch):
                budget -= self._choose(sequence, count, batch)
                index += 1
        if self.num_preemptions == preemptions:  # else what was just put back would come straight in again
            self._admit(budget, batch)
        return batch

    def commit(self, batch: Batch) -> None:
        """The step ran: its tokens have keys and values now, and the blocks they filled may be found by others.

        Not before: a block must not be shared while the step that fills it is under way, or when that step fails.
        """
        for sequence, chunk in zip(batch.sequences, batch.chunks, strict=True):
            sequence.num_computed += len(chunk.token_ids)
            if self.enable_prefix_caching:
                self._register_full_blocks(sequence)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _choose(self, sequence: Sequence, count: int, batch: Batch) -> int:
        start = sequence.num_computed
        end = start + count
        batch.chunks.append(Chunk(sequence.tokens[start:end], start, sequence.block_ids, end == len(sequence.tokens), sequence.state_id))
        batch.sequences.append(sequence)
        return count

    def _make_room(self, sequence: Sequence, count: int, batch: Batch) -> bool:
        """Give a running sequence blocks for `count` more tokens, putting back the youngest while there are too few.

        False when the sequence itself left `running`.
        """
        need = self._blocks_for(sequence.num_computed + count) - len(sequence.block_ids)
        while need > self.pool.num_free:
            if len(self.running) == 1:
                self._refuse(sequence, batch)
                return False
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        if need > 0:
            sequence.block_ids += self.pool.take(need)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.finish(sequence)
        sequence.place = Place.WAITING
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _refuse(self, sequence: Sequence, batch: Batch) -> None:
        self.finish(sequence)
        count = len(sequence.tokens)
        why = (
            f"the KV cache is too small: {count} tokens need {self._blocks_for(count)} blocks of {self.block_size} and "
            f"num_blocks={self.pool.num_blocks}; raise num_blocks or kv_cache_memory_bytes, or lower max_tokens"
        )
        batch.refused.append((sequence, why))

    def _admit(self, budget: int, batch: Batch) -> None:
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            found = self._find_prefix(sequence)
            num_cached = len(found) * self.block_size
            count = min(len(sequence.tokens) - num_cached, budget)
            if self.whole_prompts and count < len(sequence.tokens):
                return  # it comes first in the next step
            free = self.pool.num_free - sum(map(self.pool.is_unused, found))
            # Room for all its tokens, not for the first chunk only, and a block for each running sequence to grow into: admitting into a
            # full pool would preempt at the next step and compute the same tokens again and again.
            if self._blocks_for(len(sequence.tokens)) - len(found) + len(self.running) > free:
                if self.running:
                    return
                self._refuse(sequence, batch)
                continue
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.state_id = self._state_ids.pop()
            sequence.place = Place.RUNNING
            self.pool.share(found)
            sequence.block_ids = found + self.pool.take(self._blocks_for(num_cached + count) - len(found))
            sequence.num_computed = num_cached
            sequence.num_registered = len(found)
            budget -= self._choose(sequence, count, batch)
            self._count_hits(sequence, num_cached)

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that already hold the head of the sequence. Its last token is always left to compute: its logits are wanted."""
        if not self.enable_prefix_caching:
            return []
        return self.pool.find(prefix.keys_of(sequence, (len(sequence.tokens) - 1) // self.block_size, self.block_size))

    def _count_hits(self, sequence: Sequence, num_cached: int) -> None:
        if sequence.num_cached is None:  # a preempted one finds its own blocks again; that is no merit of the cache
            sequence.num_cached = num_cached
            self.num_prefix_queried_tokens += len(sequence.tokens)
            self.num_prefix_hit_tokens += num_cached

    def _register_full_blocks(self, sequence: Sequence) -> None:
        full = sequence.num_computed // self.block_size
        if full > sequence.num_registered:
            keys = prefix.keys_of(sequence, full, self.block_size)
            for index in range(sequence.num_registered, full):
                self.pool.register(sequence.block_ids[index], keys[index])
            sequence.num_registered = full
