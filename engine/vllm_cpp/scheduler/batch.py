"""What one step computes.

Owns: the two records that pass from the scheduler to the runner. Must not know how either side works.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """A run of tokens of one sequence.

    `start` is the position of the first token. `block_ids` are the KV blocks of the sequence, enough for `start + len(token_ids)` tokens;
    the list is the sequence's own, which only grows: a sequence that loses its blocks gets another list. `sample` says that the logits of
    the last token are wanted. `state_id`, below max_num_seqs, is the sequence's alone while it runs: recurrent layers keep what they know
    of it there.
    """

    token_ids: list[int]
    start: int
    block_ids: list[int]
    sample: bool
    state_id: int = 0


@dataclass(slots=True)
class Batch:
    """The chunks of one step, the sequence of each, and what was turned away while choosing them."""

    chunks: list[Chunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    refused: list[tuple[Sequence, str]] = field(default_factory=list)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences whose logits the runner returns, in the order of its rows."""
        return [sequence for chunk, sequence in zip(self.chunks, self.sequences, strict=True) if chunk.sample]
