"""The block pool and the prefix hashes, against obvious models of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_cpp.scheduler import BlockPool, Sequence
from vllm_cpp.scheduler.prefix import block_key, keys_of


def test_blocks_are_taken_lowest_first_and_found_by_key_after_release():
    pool = BlockPool(4)
    blocks = pool.take(3)
    assert blocks == [0, 1, 2]
    pool.register(0, b"a")
    pool.register(1, b"b")
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (4, 2, 0)
    assert pool.find([b"a", b"b", b"c"]) == [0, 1]
    assert pool.find([b"b", b"x", b"a"]) == [1]


def test_blocks_that_nobody_takes_cost_nothing():
    pool = BlockPool(1 << 40)
    assert pool.take(2) == [0, 1]
    pool.release([0])
    assert pool.take(2) == [0, 2]
    assert (pool.num_free, pool.num_used) == ((1 << 40) - 3, 3)


def test_blank_blocks_go_before_cached_ones_and_the_tail_before_the_head():
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block_id, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register(block_id, key)
    pool.release(blocks)
    assert pool.take(1) == [3]
    assert pool.take(1) == [2]
    assert pool.find([b"a", b"b", b"c"]) == [0, 1]


def test_what_was_used_last_is_evicted_last():
    pool = BlockPool(2)
    for key in (b"a", b"b"):
        (block_id,) = pool.take(1)
        pool.register(block_id, key)
        pool.release([block_id])
    pool.share(pool.find([b"a"]))
    pool.release([0])
    assert pool.take(1) == [1]
    assert pool.find([b"a"]) == [0]


def test_a_shared_block_is_not_handed_out_until_its_last_use_ends():
    pool = BlockPool(1)
    pool.take(1)
    pool.register(0, b"a")
    pool.share([0])
    pool.release([0])
    assert pool.num_free == 0
    pool.release([0])
    assert pool.num_free == 1


def test_a_second_copy_of_a_key_stays_nameless():
    pool = BlockPool(3)
    pool.take(2)
    pool.register(0, b"a")
    pool.register(1, b"a")
    pool.release([0, 1])
    assert pool.num_cached == 1
    assert pool.find([b"a"]) == [0]


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool beside a dict of counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[list[int]] = []
        self.contents: dict[int, int] = {}  # block -> key, as far as it must still be true
        self.next_key = 0

    @precondition(lambda self: self.pool.num_free > 0)
    @rule(data=st.data())
    def take(self, data):
        blocks = self.pool.take(data.draw(st.integers(1, self.pool.num_free)))
        in_use = {block for held in self.held for block in held}
        assert not in_use & set(blocks)
        for block in blocks:
            self.contents.pop(block, None)
            if data.draw(st.booleans()):
                self.pool.register(block, str(self.next_key).encode())
                self.contents[block] = self.next_key
                self.next_key += 1
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def share(self, data):
        block = data.draw(st.sampled_from(sorted(self.contents)))
        assert self.pool.find([str(self.contents[block]).encode()]) == [block]
        self.pool.share([block])
        self.held.append([block])

    @invariant()
    def counts_agree(self):
        in_use = {block for held in self.held for block in held}
        assert self.pool.num_used == len(in_use)
        assert self.pool.num_cached == len(set(self.contents) - in_use)
        assert all(self.pool.is_unused(block) == (block not in in_use) for block in range(6))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_keys_are_equal_exactly_where_the_prefixes_are(first, second):
    sequences = [Sequence(first), Sequence(second)]
    keys = [keys_of(sequence, len(sequence.tokens) // 2, 2) for sequence in sequences]
    for index, (one, other) in enumerate(zip(*keys, strict=False)):
        assert (one == other) == (first[: 2 * index + 2] == second[: 2 * index + 2])


def test_a_key_names_the_tokens_and_all_before_them():
    assert block_key(b"", [1, 2]) != block_key(block_key(b"", [1, 2]), [1, 2])
    assert block_key(b"", [256]) != block_key(b"", [1])  # not the low bytes only
