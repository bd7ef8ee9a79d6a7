"""The engine over a fake model: whatever else is going on, each request gets what it would get alone."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import EOS, FakeRunner, FakeTokenizer, decoded, engine_params, fake_logits
from vllm_cpp.config.sampling import SamplingParams, Structured
from vllm_cpp.core import Engine
from vllm_cpp.errors import GenerationError, InternalError, InvalidArgumentError
from vllm_cpp.request import LibraryThread, WaitTimeoutError

PATIENCE_S = 60.0


@pytest.fixture
def make():
    """Engines that are closed at the end of the test."""
    engines = []

    def build(runner=None, **keywords):
        engines.append(Engine(runner or FakeRunner(), FakeTokenizer(), engine_params(**keywords)))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def greedy(**keywords):
    return SamplingParams(temperature=0.0, **keywords)


def alone(prompt, count, eos_weight=0.0):
    """Greedy tokens without an engine."""
    tokens = list(prompt.encode() if isinstance(prompt, str) else prompt)
    begin = len(tokens)
    while len(tokens) < begin + count:
        tokens.append(int(fake_logits(tokens, eos_weight).argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[begin:]


class Recorder:
    """A callback that keeps what it is given."""

    def __init__(self, answer=lambda deltas: True):
        self.calls = []
        self.threads = set()
        self.answer = answer

    def __call__(self, text, finished):
        text.encode()
        self.calls.append((text, finished))
        self.threads.add(threading.current_thread())
        return self.answer(self.calls)

    @property
    def text(self):
        return "".join(text for text, _ in self.calls)


class Gate:
    """Holds the model's step until it is opened; says when a step has arrived."""

    def __init__(self, runner):
        self.arrived = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)
        self.open = False
        runner.before_run = self

    def __call__(self, chunks):
        if not self.open:
            self.arrived.release()
            assert self.passes.acquire(timeout=PATIENCE_S)

    def await_step(self):
        assert self.arrived.acquire(timeout=PATIENCE_S)

    def release(self):
        self.open = True
        self.passes.release(1000)


# one request


def test_a_completion(make):
    completion = make().submit("hello", greedy(max_tokens=12)).wait(PATIENCE_S)
    assert completion.token_ids == alone("hello", 12)
    assert completion.text == decoded(completion.token_ids)
    assert (completion.finish_reason, completion.prompt_tokens, completion.completion_tokens) == ("length", 5, 12)
    timings = completion.timings
    assert timings.submitted <= timings.first_token <= timings.finished <= time.monotonic()


def test_a_prompt_of_token_ids(make):
    engine = make()
    for prompt in (list(b"hello"), tuple(b"hello"), np.frombuffer(b"hello", np.uint8)):
        assert engine.submit(prompt, greedy(max_tokens=3)).wait(PATIENCE_S).token_ids == alone("hello", 3)


def test_a_prompt_gets_the_begin_token():
    runner = FakeRunner()
    tokenizer = FakeTokenizer(add_bos=True)
    with Engine(runner, tokenizer, engine_params()) as engine:
        assert engine.submit("a", greedy(max_tokens=1)).wait(PATIENCE_S).prompt_tokens == 2
    assert runner.batches[0][0].token_ids == [tokenizer.bos_id, ord("a")]


def test_an_end_token_ends_the_text_and_counts(make):
    engine = make(FakeRunner(eos_weight=1.0))
    completion = engine.submit("a", greedy(max_tokens=400)).wait(PATIENCE_S)
    assert completion.finish_reason == "stop"
    assert completion.token_ids == alone("a", 400, eos_weight=1.0)
    assert completion.token_ids[-1] == EOS
    assert completion.text == decoded(completion.token_ids)


def test_min_tokens_and_ignore_eos(make):
    engine = make(FakeRunner(eos_weight=60.0))
    assert engine.submit("a", greedy(max_tokens=9)).wait(PATIENCE_S).token_ids == [EOS]
    completion = engine.submit("a", greedy(max_tokens=9, min_tokens=4)).wait(PATIENCE_S)
    assert completion.completion_tokens == 5
    completion = engine.submit("a", greedy(max_tokens=9, ignore_eos=True)).wait(PATIENCE_S)
    assert (completion.token_ids, completion.finish_reason) == ([EOS] * 9, "length")


@pytest.mark.parametrize("max_tokens", [None, 0, 10_000])
def test_generation_ends_when_the_context_is_full(make, max_tokens):
    engine = make(FakeRunner(max_model_len=40))
    completion = engine.submit("hello", greedy(max_tokens=max_tokens)).wait(PATIENCE_S)
    assert (completion.finish_reason, completion.completion_tokens) == ("length", 35)
    assert engine.submit("h" * 39, greedy(max_tokens=max_tokens)).wait(PATIENCE_S).completion_tokens == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text("abc é€", min_size=1, max_size=3), min_size=1, max_size=3), st.integers(0, 9), st.booleans())
def test_stop_strings_against_the_whole_text(stops, min_tokens, streamed):
    tokens = alone("stop", 40)
    expected, reason = decoded(tokens), "length"
    for count in range(min_tokens + 1, 41):  # text that only the first min_tokens tokens hold does not stop
        settled, text = decoded_prefix(tokens[:min_tokens]), decoded_prefix(tokens[:count]) if count < 40 else decoded(tokens)
        found = [text[:end] for end in range(len(settled) + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
        if found:
            ended = [stop for stop in stops if found[0].endswith(stop)]
            expected, reason = found[0][: len(found[0]) - max(map(len, ended))], "stop"
            break
    recorder = Recorder() if streamed else None
    with Engine(FakeRunner(), FakeTokenizer(), engine_params()) as engine:
        completion = engine.submit("stop", greedy(max_tokens=40, min_tokens=min_tokens, stop=tuple(stops)), recorder).wait(PATIENCE_S)
    assert (completion.text, completion.finish_reason) == (expected, reason)
    assert recorder is None or recorder.text == expected


def decoded_prefix(token_ids):
    """The text that is certain after these tokens."""
    stream = FakeTokenizer().incremental()
    return "".join(map(stream.push, token_ids))


def test_a_stop_string_may_end_with_the_last_character_which_no_token_finished(make):
    def half_a_character(token_ids, logits):
        logits[0xE2] = np.inf

    params = greedy(max_tokens=1, stop=("\ufffd",), logits_processor=half_a_character)
    completion = make().submit("a", params).wait(PATIENCE_S)
    assert (completion.text, completion.finish_reason) == ("", "stop")


# refusals at submit


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ("", "no tokens"),
        ([], "no tokens"),
        ("a" * 160, r"160 tokens, and max_model_len=40 leaves room for 39"),
        ("a" * 161, r"161 characters, and max_model_len=40 tokens of at most 4 characters hold 160; shorten it"),
        ("a" * 40, r"40 tokens, and max_model_len=40 leaves room for 39"),
        ([1, 258], "token id 258; the model has ids 0 to 257"),
        ([-1], "token id -1"),
        ([1, 1.5], r"prompt\[1\] must be an integer, not 1.5"),
        ([True], r"prompt\[0\] must be an integer, not True"),
        (b"a", "sequence of token ids, not bytes"),
        (bytearray(b"a"), "not bytearray"),
        (None, "NoneType"),
    ],
)
def test_prompts_that_are_refused(make, prompt, what):
    engine = make(FakeRunner(max_model_len=40))
    with pytest.raises(InvalidArgumentError, match=what):
        engine.submit(prompt, greedy())
    assert engine.stats()["requests_waiting"] == 0


def test_a_stop_token_outside_the_vocabulary_is_refused(make):
    engine = make()
    with pytest.raises(InvalidArgumentError, match=r"stop_token_ids\[1\] is token id 258; the model has ids 0 to 257"):
        engine.submit("a", greedy(stop_token_ids=(257, 258)))


def test_a_prompt_beyond_the_kv_cache_is_refused_naming_it(make):
    with pytest.raises(InvalidArgumentError, match=r"33 tokens.*num_blocks=2 of 16"):
        make(FakeRunner(num_blocks=2)).submit("a" * 33, greedy())


def test_structured_output_is_refused_by_name(make):
    with pytest.raises(InvalidArgumentError, match=r"structured output \(regex\)"):
        make().submit("a", SamplingParams(structured=Structured("regex", "a*")))


def test_generation_beyond_the_kv_cache_ends_with_an_error_and_the_engine_serves_on(make):
    engine = make(FakeRunner(num_blocks=2))
    request = engine.submit("a" * 30, greedy(max_tokens=None))
    with pytest.raises(GenerationError, match="num_blocks=2"):
        request.wait(PATIENCE_S)
    assert request.completion.finish_reason == "error"
    assert engine.submit("a", greedy(max_tokens=2)).wait(PATIENCE_S).token_ids == alone("a", 2)


# many requests


@pytest.mark.parametrize("num_blocks", [64, 6])
def test_batched_equals_one_by_one_greedy_and_seeded(make, num_blocks):
    prompts = ["hello", "help", "hello world, this is a longer prompt", "x", "hello world, this is another"]
    kinds = [
        greedy(max_tokens=30),
        SamplingParams(seed=5, max_tokens=30),
        SamplingParams(
            seed=6, max_tokens=30, temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, presence_penalty=0.5, repetition_penalty=1.2
        ),
    ]
    one_by_one = make(max_num_seqs=1, enable_prefix_caching=False)
    expected = [one_by_one.submit(prompt, params).wait(PATIENCE_S) for prompt in prompts for params in kinds]
    engine = make(FakeRunner(num_blocks=num_blocks), max_num_batched_tokens=16)
    requests = [engine.submit(prompt, params) for prompt in prompts for params in kinds]
    for request, alone_ in zip(requests, expected, strict=True):
        assert request.wait(PATIENCE_S).token_ids == alone_.token_ids
    stats = engine.stats()
    assert (stats["preemptions"] > 0) == (num_blocks == 6)
    assert stats["kv_blocks_used"] == 0


def test_the_prefix_cache_can_be_off(make):
    engine = make(enable_prefix_caching=False)
    completions = [engine.submit("a" * 40, greedy(max_tokens=5)).wait(PATIENCE_S) for _ in range(2)]
    assert [completion.cached_prompt_tokens for completion in completions] == [0, 0]


def test_many_threads_at_once(make):
    engine = make(max_num_seqs=4)
    failures = []

    def client(number):
        for turn in range(5):
            prompt = f"thread {number} turn {turn}"
            recorder = Recorder()
            completion = engine.submit(prompt, greedy(max_tokens=10), recorder if turn % 2 else None).wait(PATIENCE_S)
            if completion.token_ids != alone(prompt, 10) or (turn % 2 and recorder.text != completion.text):
                failures.append(prompt)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert engine.stats()["requests_finished"] == {"stop": 0, "length": 60, "abort": 0, "error": 0}


def test_stats(make):
    engine = make()
    for _ in range(2):
        completion = engine.submit("a" * 40, greedy(max_tokens=5)).wait(PATIENCE_S)
    assert completion.cached_prompt_tokens == 32
    stats = engine.stats()
    runner = stats.pop("runner")
    assert stats == {
        "requests_waiting": 0,
        "requests_running": 0,
        "requests_finished": {"stop": 0, "length": 2, "abort": 0, "error": 0},
        "prompt_tokens": 80,
        "generated_tokens": 10,
        "steps": 10,
        "preemptions": 0,
        "kv_blocks_total": 64,
        "kv_blocks_used": 0,
        "kv_blocks_cached": 2,
        "prefix_cache_queried_tokens": 80,
        "prefix_cache_hit_tokens": 32,
    }
    assert runner == {"batches": 10}


# deliveries


@pytest.mark.parametrize("stop", [(), ("é", "b c")])
def test_deltas_add_up_and_the_last_call_says_so(make, stop):
    recorder = Recorder()
    completion = make().submit("stream", greedy(max_tokens=60, stop=stop), recorder).wait(PATIENCE_S)
    assert recorder.text == completion.text
    assert [finished for _, finished in recorder.calls] == [False] * (len(recorder.calls) - 1) + [True]
    assert all(text for text, finished in recorder.calls if not finished)
    assert len(recorder.calls) > 5
    (thread,) = recorder.threads
    assert thread is not threading.current_thread()


def test_a_callback_that_answers_nothing_goes_on(make):
    calls = []
    completion = make().submit("a", greedy(max_tokens=5), lambda text, finished: calls.append(text)).wait(PATIENCE_S)
    assert completion.finish_reason == "length"
    assert "".join(calls) == completion.text


def test_false_from_the_callback_ends_the_request_without_another_call(make):
    engine = make(FakeRunner(max_model_len=100_000, num_blocks=8000))
    recorder = Recorder(answer=lambda calls: len(calls) < 2)
    request = engine.submit("a", greedy(max_tokens=None), recorder)
    completion = request.wait(PATIENCE_S)
    assert completion.finish_reason == "abort"
    assert (len(recorder.calls), request.error) == (2, "")
    assert completion.text.startswith(recorder.text)
    assert engine.submit("a", greedy(max_tokens=2)).wait(PATIENCE_S).token_ids == alone("a", 2)


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit("boom")])
@pytest.mark.parametrize("last", [False, True])
def test_what_a_callback_raises_is_the_requests_error(make, error, last):
    engine = make()

    def fail(text, finished):
        if finished or not last:
            raise error

    request = engine.submit("a", greedy(max_tokens=50), fail)
    with pytest.raises(GenerationError, match=f"callback of request 1 raised {type(error).__name__}: boom") as caught:
        request.wait(PATIENCE_S)
    assert caught.value.__cause__ is error
    assert "boom" in request.error
    assert engine.submit("a", greedy(max_tokens=2)).wait(PATIENCE_S).token_ids == alone("a", 2)


def test_a_callback_that_does_not_return_holds_up_nobody_else(make):
    engine = make()
    free = threading.Event()
    stuck = [engine.submit("a", greedy(max_tokens=5), lambda text, finished: free.wait(PATIENCE_S)) for _ in range(3)]
    recorder = Recorder()
    assert engine.submit("b", greedy(max_tokens=20), recorder).wait(PATIENCE_S).text == recorder.text
    assert not any(request.done for request in stuck)
    free.set()
    for request in stuck:
        assert request.wait(PATIENCE_S).finish_reason == "length"


def test_a_process_without_another_thread_fails_streamed_requests_only(make, monkeypatch):
    engine = make()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(LibraryThread, "start", refuse)
    request = engine.submit("a", greedy(max_tokens=5), Recorder())
    with pytest.raises(GenerationError, match="no thread could be started for the callback of request 1: can't start"):
        request.wait(PATIENCE_S)
    assert engine.submit("a", greedy(max_tokens=5)).wait(PATIENCE_S).token_ids == alone("a", 5)


def test_wait_returns_after_the_last_call_has(make):
    engine = make()
    entered, free = threading.Event(), threading.Event()

    def slow(text, finished):
        if finished:
            entered.set()
            free.wait(PATIENCE_S)

    request = engine.submit("a", greedy(max_tokens=3), slow)
    assert entered.wait(PATIENCE_S)
    assert request.completion.finish_reason == "length"  # known to the callback
    assert not request.done
    free.set()
    request.wait(PATIENCE_S)
    assert request.done


def test_wait_from_the_own_callback_is_refused_and_from_another_is_not(make):
    engine = make()
    errors, other_texts = [], []
    other = engine.submit("other", greedy(max_tokens=3))

    def call(text, finished):
        if finished:
            other_texts.append(other.wait(PATIENCE_S).text)
            with pytest.raises(InvalidArgumentError, match="own callback") as caught:
                own.wait()
            errors.append(caught.value)

    own = engine.prepare("a", greedy(max_tokens=3), call)
    engine.start(own).wait(PATIENCE_S)
    assert len(errors) == 1
    assert other_texts == [decoded(alone("other", 3))]


def test_wait_from_a_logits_processor_is_refused(make):
    engine = make()
    errors = []

    def processor(token_ids, logits):
        with pytest.raises(InvalidArgumentError, match="logits processor") as caught:
            request.wait()
        errors.append(caught.value)

    request = engine.prepare("a", greedy(max_tokens=1, logits_processor=processor))
    engine.start(request).wait(PATIENCE_S)
    assert len(errors) == 1


# the processor


def test_a_processor_is_called_once_a_token_with_the_ids_so_far(make):
    seen = []
    engine = make(max_num_batched_tokens=8, max_num_seqs=2)
    params = greedy(max_tokens=4, logits_processor=lambda token_ids, logits: seen.append(token_ids))
    completion = engine.submit("a prompt of several chunks", params).wait(PATIENCE_S)
    assert seen == [completion.token_ids[:count] for count in range(4)]


def test_a_failing_processor_ends_its_own_request_only(make):
    engine = make()

    def fail(token_ids, logits):
        if len(token_ids) == 2:
            raise KeyError("mine")

    failing = engine.submit("a", greedy(max_tokens=9, logits_processor=fail))
    other = engine.submit("b", greedy(max_tokens=9))
    with pytest.raises(GenerationError, match="logits processor raised KeyError"):
        failing.wait(PATIENCE_S)
    assert failing.completion.token_ids == alone("a", 2)
    assert other.wait(PATIENCE_S).token_ids == alone("b", 9)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_logits_without_a_choice_end_their_own_request_only(make, value):
    engine = make()

    def spoil(token_ids, logits):
        logits[:] = value

    requests = [engine.submit("a", SamplingParams(temperature=t, logits_processor=spoil)) for t in (0.0, 1.0)]
    for request in requests:
        with pytest.raises(GenerationError, match="no token can be chosen"):
            request.wait(PATIENCE_S)
    assert engine.submit("b", greedy(max_tokens=9)).wait(PATIENCE_S).token_ids == alone("b", 9)


# cancelling, failing, closing


def test_cancel_while_running_while_waiting_and_after_the_end(make):
    runner = FakeRunner()
    gate = Gate(runner)
    engine = make(runner, max_num_seqs=1)
    recorder = Recorder()
    running = engine.submit("a", greedy(max_tokens=None), recorder)
    waiting = engine.submit("b", greedy(max_tokens=None))
    gate.await_step()
    for request in (running, waiting, running):
        request.cancel()
    gate.release()
    for request in (running, waiting):
        assert request.wait(PATIENCE_S).finish_reason == "abort"
        assert request.error == ""
        request.cancel()
    assert recorder.calls[-1][1]
    assert recorder.text == running.completion.text
    assert waiting.completion.token_ids == []
    assert engine.stats()["requests_finished"]["abort"] == 2
    assert engine.submit("a", greedy(max_tokens=2)).wait(PATIENCE_S).token_ids == alone("a", 2)


def test_wait_with_a_time_says_that_it_is_over(make):
    runner = FakeRunner()
    gate = Gate(runner)
    request = make(runner).submit("a", greedy(max_tokens=1))
    with pytest.raises(WaitTimeoutError, match=r"request 1 is still running after 0\.01 s"):
        request.wait(0.01)
    with pytest.raises(InvalidArgumentError, match="still running"):
        request.completion  # noqa: B018 - the property raises
    assert not request.done
    gate.release()
    assert request.wait(PATIENCE_S).finish_reason == "length"


def test_a_failing_step_ends_its_requests_frees_their_blocks_and_the_engine_serves_on(make):
    runner = FakeRunner()
    engine = make(runner, max_num_seqs=2)

    def fail(chunks):
        if any(chunk.start > 3 for chunk in chunks):
            runner.before_run = lambda chunks: None
            raise MemoryError("no room")

    runner.before_run = fail
    recorder = Recorder()
    requests = [engine.submit("abc", greedy(max_tokens=9), recorder), engine.submit("abd", greedy(max_tokens=9))]
    third = engine.submit("abe", greedy(max_tokens=9))
    for request in requests:
        with pytest.raises(GenerationError, match="model step failed: MemoryError: no room"):
            request.wait(PATIENCE_S)
    assert recorder.calls[-1][1]
    assert recorder.text == requests[0].completion.text
    assert third.wait(PATIENCE_S).token_ids == alone("abe", 9)
    assert engine.stats()["kv_blocks_used"] == 0


def test_close_aborts_what_runs_wakes_waiters_and_closes_the_runner():
    runner = FakeRunner(max_model_len=10_000_000, num_blocks=700_000)
    engine = Engine(runner, FakeTokenizer(), engine_params(max_num_seqs=1))
    last_call, free = threading.Event(), threading.Event()

    def answer(calls):
        if calls[-1][1]:
            last_call.set()
            free.wait(PATIENCE_S)

    def free_later():
        last_call.wait(PATIENCE_S)
        time.sleep(0.1)  # for a close that does not wait to return meanwhile
        free.set()

    recorder = Recorder(answer)
    requests = [engine.submit("a", greedy(max_tokens=None), recorder), engine.submit("b", greedy(max_tokens=None))]
    reasons = []
    waiters = [threading.Thread(target=lambda request=request: reasons.append(request.wait().finish_reason)) for request in requests]
    waiters.append(threading.Thread(target=free_later))
    for waiter in waiters:
        waiter.start()
    engine.close()
    assert free.is_set()  # no call is under way, or comes, after close
    assert recorder.calls[-1][1]
    assert not any(thread.is_alive() for thread in recorder.threads)
    for waiter in waiters:
        waiter.join()
    assert reasons == ["abort", "abort"]
    assert runner.closed_by.name == "vllm-engine"
    with pytest.raises(GenerationError, match="closed"):
        engine.submit("a", greedy())
    engine.close()


@pytest.mark.parametrize("where", ["callback", "processor"])
def test_close_from_the_librarys_own_threads_only_asks(where):
    runner = FakeRunner()
    engine = Engine(runner, FakeTokenizer(), engine_params())
    if where == "callback":
        request = engine.submit("a", greedy(max_tokens=None), lambda text, finished: engine.close())
    else:
        request = engine.submit("a", greedy(max_tokens=None, logits_processor=lambda token_ids, logits: engine.close()))
    assert request.wait(PATIENCE_S).finish_reason == "abort"
    engine.close()
    assert runner.closed_by is not None


def test_a_mistake_of_the_engine_leaves_nobody_waiting(make, monkeypatch):
    runner = FakeRunner()
    gate = Gate(runner)
    engine = make(runner)
    monkeypatch.setattr(engine._scheduler, "commit", lambda batch: 1 / 0)
    requests = [engine.submit("a", greedy())]
    gate.await_step()
    requests.append(engine.submit("b", greedy(), Recorder()))
    gate.release()
    for request in requests:
        with pytest.raises(InternalError, match="ZeroDivisionError"):
            request.wait(PATIENCE_S)
    engine._thread.join()
    with pytest.raises(GenerationError, match="stopped after an internal error"):
        engine.submit("a", greedy())
    assert runner.closed_by is not None


def test_each_waiter_gets_its_own_exception(make):
    runner = FakeRunner()
    runner.before_run = lambda chunks: 1 / 0
    request = make(runner).submit("a", greedy())
    caught = []
    for _ in range(2):
        with pytest.raises(GenerationError) as info:
            request.wait(PATIENCE_S)
        caught.append(info.value)
    assert caught[0] is not caught[1]


# threads and processes


def test_threads_of_the_library_take_no_signals_and_the_callers_mask_stays(make):
    masks = []

    def note(*_):
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    mine = signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR2})
    try:
        make().submit("a", greedy(max_tokens=1, logits_processor=note), note).wait(PATIENCE_S)
    finally:
        after = signal.pthread_sigmask(signal.SIG_SETMASK, mine)
    unblockable = {signal.SIGKILL, signal.SIGSTOP}
    assert len(masks) >= 2
    assert all(mask == signal.valid_signals() - unblockable for mask in masks)
    assert after == {signal.SIGUSR2}


def test_an_idle_engine_sleeps(make):
    """The step thread waits without a time limit: it is woken by callers only."""
    engine = make()
    engine.submit("a", greedy(max_tokens=1)).wait(PATIENCE_S)
    waits = []
    original = engine._wake.wait
    engine._wake.wait = lambda timeout=None: (waits.append(timeout), original(timeout))
    engine.submit("a", greedy(max_tokens=1)).wait(PATIENCE_S)
    for _ in range(1000):
        if waits:
            break
        time.sleep(0.01)
    assert waits == [None]


def test_an_ended_request_keeps_none_of_the_engines_state(make):
    engine = make()
    request = engine.submit("a", greedy(max_tokens=1))
    job = weakref.ref(request.job.sampler) if request.job else None
    request.wait(PATIENCE_S)
    assert request.job is None
    engine.submit("b", greedy(max_tokens=1)).wait(PATIENCE_S)
    gc.collect()
    assert job is None or job() is None


def test_a_program_that_forgets_to_close_ends(tmp_path):
    script = tmp_path / "forgetful.py"
    script.write_text(
        "from fakes import FakeRunner, FakeTokenizer, engine_params\n"
        "from vllm_cpp.config.sampling import SamplingParams\n"
        "from vllm_cpp.core import Engine\n"
        "import os\n"
        "class Runner(FakeRunner):\n"
        "    def close(self):\n"
        "        os.write(1, b'closed\\n')\n"
        "runner = Runner(max_model_len=10**7, num_blocks=10**5)\n"
        "engine = Engine(runner, FakeTokenizer(), engine_params())\n"
        "engine.submit('a', SamplingParams(max_tokens=0), lambda text, finished: None)\n"
        "print('end', flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\nclosed\n", "")


@pytest.mark.parametrize(("is_moe", "max_num_seqs", "tokens"), [(False, 4, 2048), (True, 32, 8192), (True, 33, 4096)])
def test_tokens_of_a_step_by_default(make, is_moe, max_num_seqs, tokens):
    runner = FakeRunner()
    runner.is_moe = is_moe
    assert make(runner, max_num_seqs=max_num_seqs)._scheduler.max_num_batched_tokens == tokens
