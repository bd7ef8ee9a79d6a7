"""Continuous batching: what runs when, and that nothing the scheduler does changes what is computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeRunner, fake_logits
from vllm_cpp.scheduler import Scheduler, Sequence


def make(num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, **keywords):
    return Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **keywords,
    )


def greedy(prompt, count):
    """One sequence alone, no scheduler: the reference."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake_logits(tokens).argmax()))
    return tokens


def serve(scheduler, runner, wanted, on_step=lambda batch: None):
    """Run to the end; `wanted` maps each sequence to how many tokens it is to generate. The sequences that were refused."""
    left = dict(wanted)
    refused = {}
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch.chunks or batch.refused
        refused.update(batch.refused)
        assert sum(len(chunk.token_ids) for chunk in batch.chunks) <= scheduler.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.max_num_seqs
        if not batch.chunks:
            continue
        logits = runner.run(batch.chunks)
        scheduler.commit(batch)
        on_step(batch)
        for sequence, row in zip(batch.sampled, logits, strict=True):
            scheduler.append(sequence, int(row.argmax()))
            left[sequence] -= 1
            if left[sequence] == 0:
                scheduler.finish(sequence)
    assert scheduler.pool.num_used == 0
    return refused


def prompt_of(length, seed):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def sizes(batch):
    return [len(chunk.token_ids) for chunk in batch.chunks]


def test_a_prompt_is_cut_to_the_budget_and_only_its_last_chunk_is_sampled():
    scheduler, runner = make(max_num_batched_tokens=10, max_num_seqs=4), FakeRunner()
    sequence = Sequence(prompt_of(25, 1))
    scheduler.add(sequence)
    steps = []
    serve(scheduler, runner, {sequence: 3}, lambda batch: steps.append((sizes(batch), [chunk.sample for chunk in batch.chunks])))
    assert steps == [([10], [False]), ([10], [False]), ([5], [True]), ([1], [True]), ([1], [True])]
    assert sequence.tokens == greedy(prompt_of(25, 1), 3)


def test_decodes_come_first_and_a_new_prompt_gets_what_is_left_of_the_budget():
    scheduler, runner = make(max_num_batched_tokens=10, max_num_seqs=4), FakeRunner()
    first, second = Sequence(prompt_of(5, 1)), Sequence(prompt_of(20, 2))
    scheduler.add(first)
    steps = []
    wanted = {first: 4, second: 1}

    def on_step(batch):
        steps.append(sizes(batch))
        if len(steps) == 1:
            scheduler.add(second)

    serve(scheduler, runner, wanted, on_step)
    assert steps == [[5], [1, 9], [1, 9], [1, 2]]


def test_first_come_first_served_under_max_num_seqs():
    scheduler, runner = make(max_num_seqs=2), FakeRunner()
    sequences = [Sequence(prompt_of(4, seed)) for seed in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    ended = []

    def on_step(batch):
        ended.extend(sequences.index(sequence) for sequence in batch.sampled)

    serve(scheduler, runner, dict.fromkeys(sequences, 1), on_step)
    assert ended == [0, 1, 2, 3]
    assert [len(batch) for batch in runner.batches] == [2, 2]


def test_a_found_prefix_is_not_computed_again_and_changes_nothing():
    scheduler, runner = make(), FakeRunner()
    prompt = prompt_of(40, 1)
    first, second = Sequence(prompt), Sequence(prompt[:35] + prompt_of(5, 2))
    scheduler.add(first)
    serve(scheduler, runner, {first: 2})
    scheduler.add(second)
    batches = len(runner.batches)
    serve(scheduler, runner, {second: 2})
    assert second.num_cached == 32
    assert [len(chunk.token_ids) for chunk in runner.batches[batches]] == [8]
    assert second.tokens == greedy(prompt[:35] + prompt_of(5, 2), 2)
    assert (scheduler.num_prefix_queried_tokens, scheduler.num_prefix_hit_tokens) == (80, 32)


def test_a_fully_cached_prompt_still_computes_its_last_token():
    scheduler, runner = make(), FakeRunner()
    prompt = prompt_of(32, 1)
    for _ in range(2):
        sequence = Sequence(prompt)
        scheduler.add(sequence)
        serve(scheduler, runner, {sequence: 1})
        assert sequence.tokens == greedy(prompt, 1)
    assert sequence.num_cached == 16
    assert [chunk.start for chunk in runner.batches[-1]] == [16]


def test_a_generated_text_is_a_prefix_too():
    scheduler, runner = make(), FakeRunner()
    first = Sequence(prompt_of(20, 1))
    scheduler.add(first)
    serve(scheduler, runner, {first: 30})
    second = Sequence(first.tokens)
    scheduler.add(second)
    serve(scheduler, runner, {second: 1})
    assert second.num_cached == 48


def test_the_prefix_cache_can_be_off():
    scheduler, runner = make(enable_prefix_caching=False), FakeRunner()
    for _ in range(2):
        sequence = Sequence(prompt_of(40, 1))
        scheduler.add(sequence)
        serve(scheduler, runner, {sequence: 1})
        assert sequence.num_cached == 0
    assert scheduler.pool.num_cached == 0


def test_a_failed_step_leaves_nothing_in_the_prefix_cache():
    scheduler = make()
    sequence = Sequence(prompt_of(40, 1))
    scheduler.add(sequence)
    scheduler.schedule()
    scheduler.finish(sequence)
    assert (scheduler.pool.num_used, scheduler.pool.num_cached) == (0, 0)


def test_the_youngest_is_put_back_when_blocks_run_out_and_resumes_with_the_same_tokens():
    scheduler, runner = make(num_blocks=6), FakeRunner(num_blocks=6)
    old, young = Sequence(prompt_of(30, 1)), Sequence(prompt_of(30, 2))
    scheduler.add(old)
    scheduler.add(young)
    serve(scheduler, runner, {old: 40, young: 40})
    assert scheduler.num_preemptions == 1
    assert old.tokens == greedy(prompt_of(30, 1), 40)
    assert young.tokens == greedy(prompt_of(30, 2), 40)
    assert young.num_cached == 0  # finding its own blocks again is no hit


def test_a_sequence_that_is_put_back_leaves_its_list_of_blocks_as_it_was():
    """The runner knows by the list whether a sequence's blocks are those it wrote down before."""
    scheduler = make(num_blocks=6)
    old, young = Sequence(prompt_of(30, 1)), Sequence(prompt_of(30, 2))
    scheduler.add(old)
    scheduler.add(young)
    scheduler.commit(scheduler.schedule())
    held, blocks = young.block_ids, list(young.block_ids)
    while not scheduler.num_preemptions:
        scheduler.append(old, 0)
        scheduler.append(young, 0)
        grown = held is young.block_ids
        scheduler.commit(scheduler.schedule())
        assert held[: len(blocks)] == blocks
        blocks = list(held)
    assert grown, "a running sequence keeps its list"
    assert blocks
    assert young.block_ids is not held


def test_a_sequence_that_was_put_back_is_the_first_to_come_in_again():
    scheduler, runner = make(num_blocks=6, max_num_seqs=2), FakeRunner(num_blocks=6)
    old, young, later = (Sequence(prompt_of(30, seed)) for seed in range(3))
    for sequence in (old, young, later):
        scheduler.add(sequence)
    ran = []
    serve(scheduler, runner, {old: 40, young: 40, later: 1}, lambda batch: ran.extend(batch.sequences))
    assert scheduler.num_preemptions == 1
    gap = next(index for index in range(len(ran)) if ran[index] is old and ran[index + 1] is old)  # the young one is out
    assert later not in ran[:gap]
    assert young in ran[gap : ran.index(later)]


@pytest.mark.parametrize("length", [49, 40])
def test_a_sequence_that_can_never_fit_is_refused_naming_num_blocks(length):
    scheduler, runner = make(num_blocks=3), FakeRunner(num_blocks=3)
    sequence = Sequence(prompt_of(length, 1))
    other = Sequence(prompt_of(8, 2))
    scheduler.add(sequence)
    scheduler.add(other)
    refused = serve(scheduler, runner, {sequence: 100, other: 3})
    assert list(refused) == [sequence]
    assert "num_blocks=3" in refused[sequence]
    assert other.tokens == greedy(prompt_of(8, 2), 3)
    assert scheduler.can_ever_hold(48)
    assert not scheduler.can_ever_hold(49)


def test_a_waiting_or_running_sequence_can_leave():
    scheduler = make(max_num_seqs=1)
    running, waiting = Sequence(prompt_of(20, 1)), Sequence(prompt_of(20, 2))
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    scheduler.finish(waiting)
    scheduler.finish(running)
    scheduler.finish(running)  # it has ended already
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_the_scheduler_does_changes_the_tokens(data):
    """Batches, chunks, preemptions and prefix hits of any kind against each sequence alone."""
    block_size = data.draw(st.sampled_from([2, 4, 16]))
    num_blocks = data.draw(st.integers(-(-36 // block_size), 120 // block_size))
    scheduler = make(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_num_batched_tokens=data.draw(st.integers(1, 40)),
        enable_prefix_caching=data.draw(st.booleans()),
    )
    runner = FakeRunner(num_blocks=num_blocks, block_size=block_size)
    jobs = data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 25), st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=8)
    )
    wanted = {}
    arrivals = {}
    for seed, length, count, step in jobs:
        sequence = Sequence(prompt_of(25, seed)[:length])
        wanted[sequence] = count
        arrivals.setdefault(step, []).append(sequence)
    prompts = {sequence: list(sequence.tokens) for sequence in wanted}
    for step in range(21):
        for sequence in arrivals.get(step, ()):
            scheduler.add(sequence)
        if scheduler.has_work:
            batch = scheduler.schedule()
            rows = runner.run(batch.chunks)
            scheduler.commit(batch)
            _advance(scheduler, batch, rows, wanted)
    assert serve(scheduler, runner, {sequence: count for sequence, count in wanted.items() if count}) == {}
    for (sequence, prompt), (_, _, count, _) in zip(prompts.items(), jobs, strict=True):
        assert sequence.tokens == greedy(prompt, count)


def _advance(scheduler, batch, rows, wanted):
    for sequence, row in zip(batch.sampled, rows, strict=True):
        scheduler.append(sequence, int(row.argmax()))
        wanted[sequence] -= 1
        if wanted[sequence] == 0:
            scheduler.finish(sequence)
