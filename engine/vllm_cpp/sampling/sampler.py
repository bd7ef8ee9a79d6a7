"""The sampler of one request.

Owns: the order in which a row of logits is edited and drawn from, the request's random numbers, its counts of used tokens. Must not know
the batch: what else runs never changes a request's tokens.

Order, as in vLLM: logits processor, min_tokens, penalties, temperature, min-p, top-k, top-p, draw; greedy takes the argmax after the
penalties.

Random numbers: Philox4x64-10 with `seed` as its key and a counter from zero; the n-th sampled token uses the n-th double in [0, 1) that
numpy's `Generator.random` makes of it. So a fixed seed repeats whatever else is in the batch, and a preempted request, whose tokens are
kept, draws no number twice. Without a seed the key comes from the operating system.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from vllm_cpp.config.sampling import SamplingParams
from vllm_cpp.errors import GenerationError

from . import draw, penalties

# As in vLLM: below this the division by the temperature leaves nothing but the greatest logit.
_GREEDY_BELOW = 1e-5


class Sampler:
    """Chooses one token after another. `prompt` are the ids before the first; `end_ids` are the model's end-of-generation tokens."""

    def __init__(self, params: SamplingParams, prompt: list[int], end_ids: Iterable[int], vocab_size: int) -> None:
        self._params = params
        self._output: list[int] = []
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(end_ids))
        self.end_ids = frozenset(ends)
        self._masked = np.array(sorted(token for token in ends if token < vocab_size), np.int64)
        self._greedy = params.temperature < _GREEDY_BELOW
        self._random = None if self._greedy else np.random.Generator(np.random.Philox(key=_key(params.seed)))
        self._seen = self._used = None
        if params.repetition_penalty != 1.0:
            self._seen = penalties.TokenCounts()
            for token in set(prompt):
                self._seen.add(token)
        if params.frequency_penalty or params.presence_penalty:
            self._used = penalties.TokenCounts()

    @property
    def output(self) -> list[int]:
        """The tokens chosen so far."""
        return self._output

    def choose(self, logits: np.ndarray) -> int:
        """The next token; `logits` (f32, one vocabulary) is edited in place."""
        self._edit(logits)
        if self._random is None:
            token = draw.greatest(logits)
        else:
            params = self._params
            token = draw.draw(
                logits,
                self._random.random(),
                temperature=params.temperature,
                min_p=params.min_p,
                top_k=params.top_k,
                top_p=params.top_p,
            )
        self._output.append(token)
        for counts in (self._seen, self._used):
            if counts is not None:
                counts.add(token)
        return token

    def _edit(self, logits: np.ndarray) -> None:
        params = self._params
        if params.logits_processor is not None:
            try:
                params.logits_processor(list(self._output), logits)
            except BaseException as error:  # SystemExit too: the caller's code may end its request, not the engine
                raise GenerationError(f"the logits processor raised {type(error).__name__}: {error}") from error
        if len(self._output) < params.min_tokens:
            logits[self._masked] = -np.inf
        if self._seen is not None:
            penalties.repeat(logits, self._seen.ids, params.repetition_penalty)
        if self._used is not None:
            penalties.subtract(logits, self._used.ids, self._used.counts, params.frequency_penalty, params.presence_penalty)


def _key(seed: int | None) -> int:
    return int.from_bytes(os.urandom(8), "little") if seed is None else seed
