"""The engine: many requests over one model.

Owns: the step loop and the thread that runs it; what a request goes through from prompt to last token; the counts of what was done. Must
not know how a step is computed, how its tokens are chosen or batched, or who calls.

One thread owns the scheduler, the samplers and the runner, and is the only one to touch them; callers leave requests in an inbox and
sleep on the request. It sleeps itself, using no processor time, while there is nothing to do.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Any

import numpy as np

from vllm_cpp import log
from vllm_cpp.config import fields
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.sampling import SamplingParams
from vllm_cpp.errors import GenerationError, InternalError, InvalidArgumentError, VllmError
from vllm_cpp.request import Completion, Embedding, LibraryThread, OnDelta, Request, Timings
from vllm_cpp.sampling import Sampler, TextStream
from vllm_cpp.scheduler import Scheduler, Sequence

# Tokens of a step: expert models gain from longer ones, since an expert's weights are read once a step; many sequences share shorter ones.
DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_BATCHED_TOKENS_MOE, DEFAULT_BATCHED_TOKENS_MOE_MANY_SEQS, _MANY_SEQS = 8192, 4096, 32
_EXIT_PATIENCE_S = 30.0  # for the step under way when the interpreter ends
_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _default_batched_tokens(runner: Any, params: EngineParams) -> int:
    if not runner.is_moe:
        return DEFAULT_BATCHED_TOKENS
    return DEFAULT_BATCHED_TOKENS_MOE if params.max_num_seqs <= _MANY_SEQS else DEFAULT_BATCHED_TOKENS_MOE_MANY_SEQS


def _caches_prefixes(runner: Any, params: EngineParams) -> bool:
    """Recurrent state cannot be cut back to where a shared prefix ends, so a model that has it computes every prompt from its start. What
    is pooled of a text is such a state."""
    if params.enable_prefix_caching and runner.has_state:
        why = "this model embeds" if runner.embeds else "this model has recurrent layers, whose state belongs to one sequence"
        log.line(f"engine: enable_prefix_caching=True has no effect: {why}")
    return params.enable_prefix_caching is not False and not runner.has_state


class _Job:
    """What the step thread keeps for a request."""

    __slots__ = ("first_token", "params", "parts", "request", "sampler", "sequence", "submitted", "text")

    def __init__(self, request: Request, prompt: list[int], params: SamplingParams, tokenizer: Any, vocab_size: int) -> None:
        self.request = request
        self.params = params
        self.sequence = Sequence(prompt, owner=self)
        self.sampler = Sampler(params, prompt, tokenizer.eos_ids, vocab_size)
        self.text = TextStream(tokenizer.incremental(), params.stop)
        self.parts: list[str] = []
        self.submitted = time.monotonic()
        self.first_token: float | None = None

    def finish(self, reason: str) -> tuple[str, str]:
        """The text that was held back, and the reason: at the end it may turn out to be a stop string."""
        rest, stopped = self.text.finish()
        return rest, "stop" if stopped and reason == "length" else reason

    def result(self, reason: str, rest: str) -> Completion:
        output = self.sampler.output
        return Completion(
            text="".join(self.parts) + rest,
            token_ids=output,
            prompt_tokens=len(self.sequence.tokens) - len(output),
            cached_prompt_tokens=self.sequence.num_cached or 0,
            completion_tokens=len(output),
            finish_reason=reason,
            timings=Timings(self.submitted, self.first_token, time.monotonic()),
        )


class _EmbeddingJob:
    """The same for a request to embed a text: it is over when its last token is computed."""

    __slots__ = ("request", "sequence", "submitted", "values")

    def __init__(self, request: Request, tokens: list[int]) -> None:
        self.request = request
        self.sequence = Sequence(tokens, owner=self)
        self.submitted = time.monotonic()
        self.values: np.ndarray | None = None

    def finish(self, reason: str) -> tuple[str, str]:
        return "", reason

    def result(self, _reason: str, _rest: str) -> Embedding:
        return Embedding(self.values, len(self.sequence.tokens), Timings(self.submitted, None, time.monotonic()))


class Engine:
    """Runs requests on a model. Its methods may be called from any thread; `close` ends it, and closes the runner."""

    def __init__(self, runner: Any, tokenizer: Any, params: EngineParams, chat_template: Any = None) -> None:
        self.tokenizer = tokenizer
        self.params = params
        self.chat_template = chat_template
        self.model_name = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", Path(params.model_path).name)
        self._runner = runner
        self._scheduler = Scheduler(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_num_seqs=params.max_num_seqs,
            max_num_batched_tokens=max(
                params.max_num_batched_tokens or _default_batched_tokens(runner, params), runner.max_model_len if runner.whole_texts else 0
            ),
            enable_prefix_caching=_caches_prefixes(runner, params),
            whole_prompts=runner.whole_texts,
        )
        self._numbers = itertools.count(1)
        self._wake = threading.Condition()  # guards the three below
        self._inbox: deque[_Job | _EmbeddingJob] = deque()
        self._cancelled: deque[Request] = deque()
        self._closing = False
        self._cause: BaseException | None = None  # of an end that nobody asked for
        self.is_forked = False  # this is the copy in a forked child: it has no threads, and its locks may be held by nobody
        self._jobs: set[_Job | _EmbeddingJob] = set()
        self.delivery_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._num_steps = self._num_prompt_tokens = self._num_generated_tokens = 0
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._thread = LibraryThread(self._run, "vllm-engine")
        self._thread.start()
        _open_engines.add(self)

    # for callers

    def submit(self, prompt: str | Ids[int], params: SamplingParams, on_delta: OnDelta | None = None) -> Request:
        """Hand in a request and return at once.

        `on_delta(text, finished)` is called from a thread of the library; the texts joined are the completion's text, and returning False
        ends the request.
        """
        return self.start(self.prepare(prompt, params, on_delta))

    def prepare(self, prompt: str | Ids[int], params: SamplingParams, on_delta: OnDelta | None = None) -> Request:
        """A checked request that does not run yet: its `on_delta` may still be set, by whoever needs the request for it."""
        self.refuse_unless_it_generates()
        if params.structured is not None:
            raise InvalidArgumentError(f"structured output ({params.structured.kind}) is not built in this version; leave it unset")
        for index, token in enumerate(params.stop_token_ids):
            self._token_id(f"stop_token_ids[{index}]", token)
        token_ids = self._token_ids(prompt)
        self._check_length(len(token_ids))
        request = Request(next(self._numbers), self, on_delta)
        request.job = _Job(request, token_ids, params, self.tokenizer, self._runner.vocab_size)
        return request

    @property
    def embeds(self) -> bool:
        """A model does one of the two: embed, or generate."""
        return bool(self._runner.embeds)

    def refuse_unless_it_generates(self) -> None:
        if self.embeds:
            raise InvalidArgumentError(
                "this model embeds texts and generates none (its file says how their hidden states are pooled): call embed, vllm_embed in C"
            )

    def submit_embedding(self, text: str | Ids[int], name: str = "text") -> Request:
        """Hand in a text, or its token ids, to be embedded, and return at once; waiting for the request answers with an `Embedding`. A
        refusal calls the text by that name."""
        if not self.embeds:
            raise InvalidArgumentError(
                "this model generates text and does not embed (its file does not say how hidden states are pooled): call generate or chat, "
                "vllm_complete or vllm_chat in C"
            )
        token_ids = self._token_ids(text, name)
        self._check_length(len(token_ids), name, room=0)
        request = Request(next(self._numbers), self, None)
        request.job = _EmbeddingJob(request, token_ids)
        return self.start(request)

    def encode_chat(self, rendered: str) -> list[int]:
        """The ids of what the chat template made."""
        self._check_text(rendered)
        return self.tokenizer.encode_chat(rendered)

    def start(self, request: Request) -> Request:
        """Let a prepared request run."""
        if self.is_forked:
            raise GenerationError("the engine was started before fork(), and a forked child cannot use it; load after the fork, or exec")
        with self._wake:
            if self._cause is not None:
                raise GenerationError(f"the engine stopped after an internal error ({self._cause}); load the model again") from self._cause
            if self._closing:
                raise GenerationError("the engine is closed; load the model again")
            self._inbox.append(request.job)
            self._wake.notify()
        return request

    def close(self) -> None:
        """Abort what runs, wake every waiter, close the runner. Returns when no callback will be called any more.

        Called from a callback or a logits processor it only asks: the engine ends when that has returned. In a forked child it does
        nothing: the engine is the parent's.
        """
        if self.is_forked:
            return
        self._ask_to_close()
        current = threading.current_thread()
        if current is self._thread or current in self.delivery_threads:
            return
        self._thread.join()
        for thread in list(self.delivery_threads):
            thread.join()

    def stats(self) -> dict[str, Any]:
        """Counts since the engine was made, and how full it is now."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        runner_stats = getattr(self._runner, "stats", None)
        return {
            "requests_waiting": len(self._inbox) + len(scheduler.waiting),
            "requests_running": len(scheduler.running),
            "requests_finished": dict(self._finished),
            "prompt_tokens": self._num_prompt_tokens,
            "generated_tokens": self._num_generated_tokens,
            "steps": self._num_steps,
            "preemptions": scheduler.num_preemptions,
            "kv_blocks_total": pool.num_blocks,
            "kv_blocks_used": pool.num_used,
            "kv_blocks_cached": pool.num_cached,
            "prefix_cache_queried_tokens": scheduler.num_prefix_queried_tokens,
            "prefix_cache_hit_tokens": scheduler.num_prefix_hit_tokens,
            "runner": runner_stats() if runner_stats is not None else {},
        }

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # for requests

    def cancel(self, request: Request) -> None:
        if self.is_forked:
            return
        with self._wake:
            self._cancelled.append(request)
            self._wake.notify()

    def is_step_thread(self, thread: threading.Thread) -> bool:
        return thread is self._thread

    # the step thread: schedule, run, sample, deliver

    def _run(self) -> None:
        try:
            while self._take_in():
                self._step()
            failure = None
        except BaseException as error:  # noqa: BLE001 - a mistake of ours; nobody may be left waiting for it
            self._cause = error
            failure = InternalError(f"the engine stopped: {type(error).__name__}: {error}; please report it")
            failure.__cause__ = error
        self._shut(failure)

    def _take_in(self) -> bool:
        """Take what callers left, asleep while there is nothing to do; False when it is time to end."""
        if not (self._inbox or self._cancelled or self._closing) and self._scheduler.has_work:
            return True  # the common case takes no lock
        with self._wake:
            while not (self._inbox or self._cancelled or self._closing or self._scheduler.has_work):
                self._wake.wait()
            jobs, self._inbox = self._inbox, deque()
            cancelled, self._cancelled = self._cancelled, deque()
        for job in jobs:
            self._jobs.add(job)
            self._scheduler.add(job.sequence)
            self._num_prompt_tokens += len(job.sequence.tokens)
        for request in cancelled:
            if request.job in self._jobs:
                self._end(request.job, "abort")
        return not self._closing

    def _step(self) -> None:
        batch = self._scheduler.schedule()
        for sequence, why in batch.refused:
            self._end(sequence.owner, "error", GenerationError(why))
        if not batch.chunks:
            return
        self._num_steps += 1
        try:
            logits = self._runner.run(batch.chunks)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this step's requests, and the engine serves on
            for sequence in batch.sequences:
                self._end(sequence.owner, "error", _because("the model step failed", error))
            return
        self._scheduler.commit(batch)
        for sequence, row in zip(batch.sampled, logits, strict=True):
            job = sequence.owner
            try:
                self._advance(job, row)
            except VllmError as error:
                self._end(job, "error", error)
            except Exception as error:  # noqa: BLE001 - one request's trouble
                self._end(job, "error", _because("choosing or decoding a token failed", error))

    def _advance(self, job: _Job | _EmbeddingJob, row: np.ndarray) -> None:
        """One more token for a request: choose it, deliver its text, see whether it was the last. A text to embed is done."""
        if isinstance(job, _EmbeddingJob):
            job.values = row.copy()
            return self._end(job, "stop")
        token = job.sampler.choose(row)
        self._scheduler.append(job.sequence, token)
        self._num_generated_tokens += 1
        job.first_token = job.first_token or time.monotonic()
        if token in job.sampler.end_ids:
            return self._end(job, "stop")
        count = len(job.sampler.output)
        text, stopped = job.text.push(token, armed=count > job.params.min_tokens)
        if text:
            job.parts.append(text)
            job.request.deliver(text)
        if stopped:
            self._end(job, "stop")
        elif count == job.params.max_tokens or len(job.sequence.tokens) >= self._runner.max_model_len:
            self._end(job, "length")
        return None

    def _end(self, job: _Job | _EmbeddingJob, reason: str, failure: VllmError | None = None) -> None:
        self._scheduler.finish(job.sequence)
        self._jobs.discard(job)
        rest = ""
        if failure is None:
            rest, reason = job.finish(reason)
        self._report(job, reason, rest, failure)

    def _report(self, job: _Job | _EmbeddingJob, reason: str, rest: str, failure: VllmError | None) -> None:
        self._finished[reason] += 1
        job.request.job = None
        if failure is None and isinstance(job, _EmbeddingJob) and job.values is None:
            failure = GenerationError("the request was cancelled, or the engine closed, before the text was embedded")
        job.request.end(job.result(reason, rest), rest, failure)

    def _shut(self, failure: VllmError | None) -> None:
        """End every request that is left; the scheduler is not asked, it may be what failed."""
        with self._wake:
            self._closing = True
            self._jobs.update(self._inbox)
            self._inbox.clear()
        for job in self._jobs:
            self._report(job, "abort" if failure is None else "error", "", failure)
        self._jobs.clear()
        try:
            self._runner.close()
        except Exception as error:  # noqa: BLE001 - there is nobody to raise it to
            log.warn(f"closing the model failed: {error}")

    # checks of a request

    def _token_ids(self, prompt: str | Ids[int], name: str = "prompt") -> list[int]:
        if isinstance(prompt, str):
            self._check_text(prompt, name)
            return self.tokenizer.encode(prompt, add_special=True, parse_special=True)
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | memoryview):
            raise InvalidArgumentError(f"{name} must be a string or a sequence of token ids, not {type(prompt).__name__}")
        return [self._token_id(f"{name}[{index}]", token) for index, token in enumerate(prompt)]

    def _token_id(self, name: str, token: Any) -> int:
        limit = self._runner.vocab_size
        if type(token) is not int:
            token = fields.integer(name, token, -(2**63), 2**63)
        if not 0 <= token < limit:
            raise InvalidArgumentError(f"{name} is token id {token}; the model has ids 0 to {limit - 1}")
        return token

    def _check_text(self, text: str, name: str = "prompt") -> None:
        """Refuse a text that is too long however it is cut into tokens: cutting it takes a while, and on some texts much longer."""
        limit, longest = self._runner.max_model_len, self.tokenizer.longest_token_chars
        if longest is not None and len(text) > limit * longest:
            raise InvalidArgumentError(
                f"{name} has {len(text)} characters, and max_model_len={limit} tokens of at most {longest} characters hold "
                f"{limit * longest}; shorten it"
            )

    def _check_length(self, num_tokens: int, name: str = "prompt", room: int = 1) -> None:
        """`room`: tokens that must fit behind it."""
        if num_tokens == 0:
            raise InvalidArgumentError(f"{name} holds no tokens; it must have at least one")
        limit = self._runner.max_model_len
        if num_tokens > limit - room:
            raise InvalidArgumentError(
                f"{name} has {num_tokens} tokens, and max_model_len={limit} leaves room for {limit - room}; shorten it"
            )
        if not self._scheduler.can_ever_hold(num_tokens):
            raise InvalidArgumentError(
                f"{name} has {num_tokens} tokens, more than the KV cache holds: num_blocks={self._runner.num_blocks} of "
                f"{self._runner.block_size}; raise num_blocks or kv_cache_memory_bytes"
            )

    def _ask_to_close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()

    def _join_at_exit(self) -> None:
        self._thread.join(_EXIT_PATIENCE_S)


def _because(what: str, error: Exception) -> GenerationError:
    failure = GenerationError(f"{what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


@atexit.register
def _close_open_engines() -> None:
    """End the step threads before the interpreter goes: one inside a kernel would come back to nothing. Callbacks are not waited for."""
    engines = [engine for engine in _open_engines if not engine.is_forked]
    for engine in engines:
        engine._ask_to_close()
    for engine in engines:
        engine._join_at_exit()


def _mark_forked() -> None:
    """fork() copies no thread but the caller's: whoever waited for the step thread here would wait for ever."""
    for engine in list(_open_engines):
        engine.is_forked = True


os.register_at_fork(after_in_child=_mark_forked)
