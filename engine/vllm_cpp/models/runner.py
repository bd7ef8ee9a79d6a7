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
                here = slice(tokens, tokens + take)
                step.tokens[here] = chunk.token_ids[first : first + take]
                start = chunk.start + first
                step.positions[here] = np.arange(start, start + take)
                step.seqs[here] = seqs
                step.block_tables[seqs, : len(chunk.block_ids)] = chunk.block_ids
                step.run_starts[seqs : seqs + 2] = tokens, tokens + take
                step.state_ids[seqs] = chunk.state_id
                tokens, first, seqs = tokens + take, first + take, seqs + 1
            if chunk.sample:
                step.sampled[sampled] = tokens - 1
                sampled += 1
        if tokens:
            done_rows += self._run_piece(tokens, sampled, seqs, done_rows)
        return self._logits[:done_rows]

    def _run_piece(self, tokens: int, sampled: int, seqs: int, done_rows: int) -> int:
        """Run the program on what stands in the step arrays; its logits go behind the `done_rows` that are there. Returns how many rows
        came."""
        sizes = {"tokens": tokens, "sampled": sampled, "seqs": seqs}
        for count in self._builder.counts:
            count.cell[0] = count.factor * sizes[count.source]
        self._builder.first_row[0] = self._logits.ctypes.data + done_rows * self._logits.strides[0]
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
