"""Attention over the paged cache: right to 1e-5 of the largest value, and the same bits however a prompt is cut into steps, tiles, chunks
and threads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import MAX_TOKENS, Paged, address, run
from tests.reference.attention import attention as naive
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu import attention, panel
from vllm_cpp.kernels.cpu.kv_cache import KvLayout
from vllm_cpp.kernels.records import pack

GUARD = 64  # entries behind each buffer that nobody may write


class Attention:
    """Random queries, keys and values of some sequences, and the operations set up over them."""

    def __init__(
        self, contexts, heads, kv_heads, d, block_size=32, dtype="f16", n_slots=64, max_threads=5, seed=1, dv=0, window=0, sinks=False,
        temperature=0.0,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        self.contexts, self.scale, dv = contexts, d**-0.5, dv or d
        self.paged = Paged(KvLayout(kv_heads, d, block_size, dtype, dv), contexts, rng)
        self.sinks = rng.standard_normal(heads).astype(np.float32) * 3 if sinks else None
        self.variant = {"window": window, "temperature": temperature, "temperature_context": 50}
        self.queries = [rng.standard_normal((n, heads, d)).astype(np.float32) * 2 for n in contexts]
        for seq, n in enumerate(contexts):
            for position in range(n):
                self.paged.write(seq, position, rng.standard_normal((kv_heads, d)) * 1.5, rng.standard_normal((kv_heads, dv)))
        self.q = aligned_zeros((MAX_TOKENS, heads + 1, d + 3), np.float32)  # rows wider than the heads, and heads than d: strides count
        self.out = aligned_zeros((MAX_TOKENS, heads, dv), np.float32)
        max_items, chunk_tokens = MAX_TOKENS + n_slots, attention.chunk_tokens(block_size, d)
        self.plan = aligned_zeros(attention.plan_words(MAX_TOKENS, n_slots) + GUARD, np.int32)
        self.partials = aligned_zeros(n_slots * attention.partial_bytes(heads, dv) + GUARD, np.uint8)
        stride = attention.scratch_bytes(heads, kv_heads, d, dv, block_size)
        self.scratch = aligned_zeros(stride * max_threads + GUARD, np.uint8)
        self.plan_record = pack(
            attention.PLAN_FIELDS,
            count=address(self.paged.count), positions=address(self.paged.positions), seqs=address(self.paged.seqs),
            tile_tokens=attention.tile_tokens(heads, kv_heads), chunk_tokens=chunk_tokens, window=window, n_slots=n_slots,
            plan=address(self.plan), max_items=max_items,
        )  # fmt: skip
        self.record = pack(
            attention.ATTENTION_FIELDS,
            plan=address(self.plan), max_items=max_items, q=address(self.q), q_stride=self.q.strides[0],
            q_head_stride=self.q.strides[1], out=address(self.out), out_stride=self.out.strides[0], n_heads=heads, n_kv_heads=kv_heads,
            head_dim=d, value_length=dv, scale=float(self.scale), sinks=address(self.sinks), **self.variant,
            k_product_fn=panel.PRODUCTS[dtype][0].address, v_product_fn=panel.PRODUCTS[dtype][1].address,
            k_bytes=self.paged.layout.k_bytes, k_stride=self.paged.layout.k_stride, v_bytes=self.paged.layout.v_bytes,
            v_stride=self.paged.layout.v_stride, chunk_tokens=chunk_tokens,
            partials=address(self.partials), scratch=address(self.scratch), scratch_stride=stride, **self.paged.fields(),
        )  # fmt: skip

    def step(self, tokens, nth=1):
        """Outputs [tokens, heads, d] of tokens given as (sequence, position)."""
        self.paged.step(tokens)
        for row, (seq, position) in enumerate(tokens):
            self.q[row, :-1, :-3] = self.queries[seq][position]
        self.out[:] = np.nan
        for buffer in (self.scratch, self.partials):
            buffer[:] = 0xFF  # not-a-numbers: whatever is not written first shows
        run([attention.attention_plan], self.plan_record, nth)
        run([attention.attention, attention.attention_merge], self.record, nth)
        assert np.isnan(self.out[len(tokens) :]).all()
        assert (self.scratch[-GUARD:] == 0xFF).all()
        assert (self.partials[-GUARD:] == 0xFF).all()
        assert not self.plan[-GUARD:].any()
        return self.out[: len(tokens)].copy()

    def in_steps(self, cuts, seq=0, nth=1):
        """A whole prompt, `cuts` tokens at a time (the last cut again and again)."""
        n, outs, start = self.contexts[seq], [], 0
        while start < n:
            stop = min(n, start + cuts[min(len(outs), len(cuts) - 1)])
            outs.append(self.step([(seq, p) for p in range(start, stop)], nth))
            start = stop
        return np.concatenate(outs)

    def expected(self, seq, positions):
        k, v = self.paged.read(seq, self.contexts[seq])
        return naive(self.queries[seq][positions], k, v, positions, self.scale, sinks=self.sinks, **self.variant)


def same(found, expected):
    """Equal bits; zeros of either sign are told apart too."""
    return np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def close(found, expected):
    return np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "block_size", "dtype"),
    [
        (9, 3, 64, 32, "f16"),
        (4, 4, 32, 16, "f16"),
        (8, 1, 128, 32, "f16"),
        (10, 2, 96, 48, "f16"),
        (6, 2, 40, 16, "f16"),
        (7, 7, 8, 64, "f16"),
        (14, 2, 64, 32, "f32"),
        (9, 3, 64, 32, "q8_0"),
        (8, 1, 128, 48, "q8_0"),
        (6, 2, 40, 16, "q8_0"),
        (7, 7, 8, 64, "q8_0"),
    ],
)
def test_agrees_with_plain_softmax(heads, kv_heads, d, block_size, dtype):
    a = Attention([70, 5, 33], heads, kv_heads, d, block_size, dtype)
    # a chunk of one prompt, the whole of another and one token of a third, in one step
    tokens = [(0, p) for p in range(19, 70)] + [(1, p) for p in range(5)] + [(2, 32)]
    out = a.step(tokens, nth=2)
    expected = np.concatenate([a.expected(0, np.arange(19, 70)), a.expected(1, np.arange(5)), a.expected(2, np.array([32]))])
    assert close(out, expected)


VARIANTS = [
    {"heads": 6, "kv_heads": 2, "d": 64, "window": 40},
    {"heads": 6, "kv_heads": 2, "d": 40, "dv": 24, "window": 1},
    {"heads": 8, "kv_heads": 1, "d": 16, "window": 300, "sinks": True, "dtype": "f32"},
    {"heads": 4, "kv_heads": 4, "d": 96, "window": 65, "sinks": True, "dtype": "q8_0"},
    {"heads": 5, "kv_heads": 1, "d": 64, "sinks": True},
    {"heads": 4, "kv_heads": 2, "d": 32, "temperature": 0.3},
    {"heads": 6, "kv_heads": 2, "d": 24, "dv": 72, "dtype": "q8_0"},
    {"heads": 128, "kv_heads": 1, "d": 576, "dv": 512},
    {"heads": 70, "kv_heads": 1, "d": 320, "dv": 256, "window": 100, "sinks": True},
    {"heads": 20, "kv_heads": 1, "d": 288, "dv": 256, "dtype": "q8_0"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: " ".join(f"{key}={value}" for key, value in variant.items()))
def test_variants_agree_with_plain_softmax_and_keep_their_bits(variant):
    """Windows, sinks, warmer queries, values of another length and many heads a KV head: right, and the same bits however they are cut."""
    a = Attention([700], block_size=16, **variant)
    last = np.arange(630, 700)
    whole = a.step([(0, p) for p in last], nth=2)
    assert close(whole, a.expected(0, last))
    for cuts, nth in (([1], 1), ([7, 1, 3], 5), ([30, 8], 3)):
        outs, start, i = [], 630, 0
        while start < 700:
            stop = min(700, start + cuts[i % len(cuts)])
            outs.append(a.step([(0, p) for p in range(start, stop)], nth))
            start, i = stop, i + 1
        assert same(np.concatenate(outs), whole)
    early = np.arange(45)
    assert close(a.step([(0, p) for p in early], nth=3), a.expected(0, early))


def test_a_window_costs_the_same_at_any_context():
    """Items of a plan start at the window: neither the count of items nor of products grows with the context."""
    a = Attention([5000], heads=4, kv_heads=2, d=16, window=100)
    costs = set()
    for position in (400, 2448, 4752):  # at the same place of a chunk
        a.step([(0, position)])
        costs.add(tuple(a.plan[[0, 2]]))
    assert len(costs) == 1
    assert costs.pop()[1] == 100


@pytest.mark.parametrize(("heads", "nth"), [(128, 5), (16, 4), (12, 2)])
def test_many_heads_of_one_kv_head_are_shared_out(heads, nth):
    """One token with one chunk of context: every thread gets some of the heads, and all are computed once."""
    a = Attention([40], heads=heads, kv_heads=1, d=32)
    a.step([(0, 39)])
    shares = []
    for tid in range(nth):
        a.out[:] = np.nan
        attention.attention(address(a.record), tid, nth)
        shares.append(int((~np.isnan(a.out[0, :, 0])).sum()))
    assert sum(shares) == heads
    assert min(shares) > 0


def test_long_context_in_shared_chunks():
    a = Attention([1300, 700], heads=4, kv_heads=2, d=16)
    out = a.step([(0, 1299), (1, 699), (1, 3)], nth=3)
    assert a.plan[1] == 2  # two tokens have more than one chunk: they were folded by attention_merge
    assert close(out, np.concatenate([a.expected(0, np.array([1299])), a.expected(1, np.array([699, 3]))]))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "block_size", "dtype"),
    [(9, 3, 64, 32, "f16"), (6, 2, 40, 16, "f16"), (14, 2, 64, 32, "f32"), (9, 3, 64, 32, "q8_0"), (6, 2, 40, 48, "q8_0")],
)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(heads, kv_heads, d, block_size, dtype):
    a = Attention([150], heads, kv_heads, d, block_size, dtype)
    one_by_one = a.in_steps([1])
    assert same(a.in_steps([150]), one_by_one)
    rng = np.random.default_rng(7)
    for nth in (2, 3, 5):
        assert same(a.in_steps(rng.integers(1, 70, 40).tolist(), nth=nth), one_by_one)


def test_q8_0_is_exact_but_for_the_rounding_of_keys_and_values():
    """The products over int8 panels give the bits that the f32 products give over the numbers the panels mean."""
    a, b = (Attention([300, 40], heads=6, kv_heads=2, d=96, dtype=dtype) for dtype in ("q8_0", "f32"))
    for seq, n in enumerate(a.contexts):
        keys, values = a.paged.read(seq, n)
        for position in range(n):
            b.paged.write(seq, position, keys[position], values[position])
    tokens = [(0, p) for p in range(280, 300)] + [(1, 39)]
    assert same(a.step(tokens), b.step(tokens))


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_bits_do_not_depend_on_sharing_chunks_out(dtype):
    shared = Attention([1100], heads=4, kv_heads=2, d=16, dtype=dtype)
    alone = Attention([1100], heads=4, kv_heads=2, d=16, dtype=dtype, n_slots=0)
    expected = alone.in_steps([200])
    assert alone.plan[1] == 0
    for cuts, nth in (([1], 1), ([7], 3), ([3, 8, 5], 5)):
        assert same(shared.in_steps([200] * 5 + cuts, nth=nth)[1000:], expected[1000:])
        assert shared.plan[1] > 0


def test_bits_do_not_depend_on_the_other_sequences():
    a = Attention([300, 300, 40], heads=8, kv_heads=2, d=32)
    alone = a.step([(1, p) for p in range(230, 300)])
    together = a.step([(0, 299)] + [(1, p) for p in range(230, 300)] + [(2, p) for p in range(40)], nth=2)
    assert same(together[1:71], alone)


@pytest.mark.parametrize(("kv_heads", "nth"), [(3, 2), (1, 3), (2, 5)])
def test_threads_share_the_products_evenly(kv_heads, nth):
    """Late tokens of a prompt see more keys than early ones: an even share of products is not one of tokens, nor of heads."""
    a = Attention([200], heads=kv_heads * 8, kv_heads=kv_heads, d=16)
    tokens = [(0, p) for p in range(200)]
    a.step(tokens)
    shares = []
    for tid in range(nth):
        a.out[:] = np.nan
        attention.attention(address(a.record), tid, nth)
        written = ~np.isnan(a.out[:200, :, 0])
        shares.append(float((written * np.arange(1, 201)[:, None]).sum()))
    assert sum(shares) == kv_heads * 8 * 200 * 201 / 2  # each product once
    assert max(shares) <= 1.2 * sum(shares) / nth


def test_a_step_without_tokens_does_nothing():
    a = Attention([10], heads=2, kv_heads=1, d=16)
    a.paged.count[0] = 0
    run([attention.attention_plan], a.plan_record)
    run([attention.attention, attention.attention_merge], a.record)
    assert not a.out.any()
