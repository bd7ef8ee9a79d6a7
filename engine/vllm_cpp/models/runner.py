"""Runs a model's program for the chunks of a step.

Owns the step arrays, the KV cache and the thread team of one loaded model, and cuts a step into pieces that fit its buffers. Must not know
requests or sampling: chunks of token ids with their KV blocks come in, rows of logits go out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_cpp.kernels.cpu.team import Team
from vllm_cpp.models.builder import Builder, StepArrays
from vllm_cpp.residency.borrow import Weights
from vllm_cpp.scheduler.batch import Chunk


class Runner:
    """One loaded model. Not thread-safe: the step loop's thread calls it."""

    def __init__(self, builder: Builder, weights: Weights, *, vocab_size: int, max_model_len: int, is_moe: bool):
        self.vocab_size = vocab_size
        # What comes out is embeddings, of texts that may have to come as a whole; else logits.
        self.embeds = builder.pooling is not None
        self.whole_texts = builder.pooling is not None and not builder.pooling.causal
        self.max_model_len = max_model_len
        self.block_size = builder.block_size
        self.num_blocks = builder.num_kv_blocks
        self.is_moe = is_moe
        self.has_state = builder.has_state
        self.program = builder.program
        self._builder = builder  # keeps every buffer alive
        self._weights = weights
        self._stream = builder.stream
        self._step: StepArrays = builder.step
        self._table = builder.finish()
        self._logits = builder.logits
        self._logits_address, self._logits_stride = int(self._logits.ctypes.data), self._logits.strides[0]
        self._sizes = (-1, -1, -1)  # that the count cells hold
        self._blocks: list[tuple[list[int], int]] = [([], 0)] * self._step.max_seqs  # of block_tables: which list, how much of it
        self._team = Team(builder.num_threads)

    def run(self, chunks: list[Chunk]) -> np.ndarray:
        """Compute the chunks, in order; logits f32 [chunks with sample, vocab_size], good (and free to be edited) until the next call. Of a
        model that embeds: embeddings f32 [chunks with sample, embedding_length]; with `whole_texts` a chunk is a text.

        A chunk's values do not depend on the other chunks, nor on how its tokens were cut into chunks.
        """
        step = self._step
        done_rows = tokens = sampled = seqs = 0
        for chunk in chunks:
            first, length = 0, len(chunk.token_ids)
            if self.whole_texts and tokens + length > step.max_tokens:
                done_rows += self._run_piece(tokens, sampled, seqs, done_rows)
                tokens = sampled = seqs = 0
            while first < length:
                if tokens == step.max_tokens:
                    done_rows += self._run_piece(tokens, sampled, seqs, done_rows)
                    tokens = sampled = seqs = 0
                take = min(length - first, step.max_tokens - tokens)
                self._put_tokens(tokens, seqs, chunk.token_ids, first, take, chunk.start + first)
                self._put_blocks(seqs, chunk.block_ids)
                step.run_starts[seqs], step.run_starts[seqs + 1] = tokens, tokens + take
                step.state_ids[seqs] = chunk.state_id
                tokens, first, seqs = tokens + take, first + take, seqs + 1
            if chunk.sample:
                step.sampled[sampled] = tokens - 1
                sampled += 1
        if tokens:
            done_rows += self._run_piece(tokens, sampled, seqs, done_rows)
        return self._logits[:done_rows]

    # What changes from one decoding step to the next is little, and so is what is written: with the caches full of weights, every line that
    # is touched between two steps counts.

    def _put_tokens(self, at: int, row: int, token_ids: list[int], first: int, count: int, position: int) -> None:
        step = self._step
        if count == 1:
            step.tokens[at], step.positions[at], step.seqs[at] = token_ids[first], position, row
            return
        here = slice(at, at + count)
        step.tokens[here] = token_ids[first : first + count]
        step.positions[here] = np.arange(position, position + count)
        step.seqs[here] = row

    def _put_blocks(self, row: int, block_ids: list[int]) -> None:
        """A sequence's blocks; of a list that the row held before, what was added to it."""
        held, count = self._blocks[row]
        if held is not block_ids:
            count = 0
        if count < len(block_ids):
            self._step.block_tables[row, count : len(block_ids)] = block_ids[count:]
            self._blocks[row] = block_ids, len(block_ids)

    def _run_piece(self, tokens: int, sampled: int, seqs: int, done_rows: int) -> int:
        """Run the program on what stands in the step arrays; its logits go behind the `done_rows` that are there. Returns how many rows
        came."""
        if (tokens, sampled, seqs) != self._sizes:
            sizes = {"tokens": tokens, "sampled": sampled, "seqs": seqs}
            for count in self._builder.counts:
                count.cell[0] = count.factor * sizes[count.source]
            self._sizes = tokens, sampled, seqs
        self._builder.first_row[0] = self._logits_address + done_rows * self._logits_stride
        self._team.run(self._table)
        if self._stream is not None:
            self._stream.end_step()
        return sampled

    def stats(self) -> dict[str, Any]:
        """What streaming is and has counted, where experts are streamed."""
        return {} if self._stream is None else {"expert_stream": self._stream.stats()}

    def close(self) -> None:
        """Stop the threads and give back copied weights. Safe twice."""
        self._team.close()
        if self._stream is not None:
            self._stream.close()
        self._weights.close()
