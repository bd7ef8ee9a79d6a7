"""Compressed entries and attention over them against naive ones, along sequences that are cut into steps in different ways: the same bits
for every cut, company and number of threads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.kernels.paged import address, run
from tests.reference import streams as reference
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu import compressed
from vllm_cpp.kernels.records import pack

HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH, WINDOW, TOP, EPSILON, HALF = 3, 48, 21, 32, 12, 5, 1e-4, 8
LENGTH = 150


class Layer:
    """What one layer computes for two sequences, step by step."""

    def __init__(self, ratio: int, nth: int) -> None:
        self.ratio, self.nth, self.overlap = ratio, nth, int(ratio == 4)
        rng = np.random.default_rng([ratio, 3])

        def floats(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        self.per_row = 1 + self.overlap
        self.x, self.q, self.sinks = floats(2, LENGTH, WIDTH), floats(2, LENGTH, HEADS * WIDTH), floats(HEADS)
        self.rows = {
            "entry": floats(2, LENGTH, 2 * self.per_row * WIDTH),
            "key": floats(2, LENGTH, 2 * self.per_row * INDEX_WIDTH),
        }
        self.width = {"entry": WIDTH, "key": INDEX_WIDTH}
        self.ape = {name: floats(ratio, self.per_row * width) for name, width in self.width.items()}
        self.norm = {name: floats(width) for name, width in self.width.items()}
        self.index_q, self.index_weights = floats(2, LENGTH, INDEX_HEADS * INDEX_WIDTH), floats(2, LENGTH, INDEX_HEADS)
        self.angles = 100.0 ** (-np.arange(HALF) / HALF)
        self.ring_rows = ratio * self.per_row
        self.blocks = LENGTH // ratio
        sizes = {"window": WINDOW * WIDTH}
        for name, width in self.width.items():
            sizes[f"{name} ring"] = self.ring_rows * 2 * self.per_row * width
            sizes[name] = self.blocks * width
        self.at, total = {}, 0
        for name, size in sizes.items():
            self.at[name], total = 4 * total, total + size
        self.state = np.full((3, total), np.nan, np.float32)

    def step(self, chunks: list[tuple[int, int, int]]) -> list[np.ndarray]:
        """Chunks (sequence, first, last) -> attention's result of each, [tokens, HEADS * WIDTH]."""
        n = sum(last - first for _, first, last in chunks)

        def gather(values: np.ndarray) -> np.ndarray:
            out = aligned_zeros((n, values.shape[2]), np.float32)
            out[:] = np.concatenate([values[seq, first:last] for seq, first, last in chunks])
            return out

        starts = np.cumsum([0] + [last - first for _, first, last in chunks]).astype(np.int32)
        positions = np.concatenate([np.arange(first, last) for _, first, last in chunks]).astype(np.int32)
        seqs = np.repeat(np.arange(len(chunks)), np.diff(starts)).astype(np.int32)
        state_ids, count = np.array([2 - seq for seq, _, _ in chunks], np.int32), np.array([n], np.int64)
        step = {
            "count": address(count), "positions": address(positions), "seqs": address(seqs), "run_starts": address(starts),
            "state_ids": address(state_ids), "state_stride": self.state.strides[0],
        }  # fmt: skip
        base = address(self.state)
        ids, n_ids = np.full((n, TOP), -1, np.int32), np.zeros(n, np.int32)
        scores = np.full((n, self.blocks), np.nan, np.float32)
        names = ("entry", "key") if self.overlap else ("entry",)
        rows = {name: gather(self.rows[name]) for name in names}
        keeps = []
        for name in names:
            width = self.width[name]
            stride = compressed.compress_scratch_bytes(self.ratio, width)
            scratch = aligned_zeros((self.nth, stride), np.uint8)
            ring = base + self.at[f"{name} ring"]
            record = pack(
                compressed.COMPRESS_FIELDS, **step, x=address(rows[name]), x_stride=rows[name].strides[0], width=width,
                overlap=self.overlap, ratio=self.ratio, ring=ring, ring_rows=self.ring_rows, ape=address(self.ape[name]),
                norm=address(self.norm[name]), epsilon=EPSILON, frequencies=address(self.angles), half=HALF, magnitude=1.0,
                entries=base + self.at[name], scratch=address(scratch), scratch_stride=stride,
            )  # fmt: skip
            run([compressed.compress], record, self.nth)
            keeps.append((rows[name], ring, self.ring_rows))
        if self.overlap:
            q, weights = gather(self.index_q), gather(self.index_weights)
            record = pack(
                compressed.SCORE_FIELDS, **step, q=address(q), q_stride=q.strides[0], weights=address(weights),
                weights_stride=weights.strides[0], n_heads=INDEX_HEADS, width=INDEX_WIDTH, factor=0.25, ratio=self.ratio, top=TOP,
                keys=base + self.at["key"], scores=address(scores), scores_stride=scores.strides[0], ids=address(ids),
                ids_stride=ids.strides[0], n_ids=address(n_ids),
            )  # fmt: skip
            run([compressed.score_blocks, compressed.choose_blocks], record, self.nth)
        x, q, out = gather(self.x), gather(self.q), aligned_zeros((n, HEADS * WIDTH), np.float32)
        max_rows = WINDOW + self.blocks
        stride = compressed.attend_scratch_bytes(max_rows)
        scratch = aligned_zeros((self.nth, stride), np.uint8)
        record = pack(
            compressed.ATTEND_FIELDS, **step, q=address(q), q_stride=q.strides[0], n_heads=HEADS, width=WIDTH, scale=0.2,
            sinks=address(self.sinks), x=address(x), x_stride=x.strides[0], ring=base + self.at["window"], window=WINDOW,
            entries=base + self.at["entry"], ratio=self.ratio, ids=address(ids) if self.overlap else 0, ids_stride=ids.strides[0],
            n_ids=address(n_ids), out=address(out), out_stride=out.strides[0], max_rows=max_rows, scratch=address(scratch),
            scratch_stride=stride,
        )  # fmt: skip
        run([compressed.attend], record, self.nth)
        for source, ring, ring_rows in [*keeps, (x, base + self.at["window"], WINDOW)]:
            record = pack(
                compressed.KEEP_FIELDS, **step, x=address(source), x_stride=source.strides[0], width=source.shape[1], ring=ring,
                ring_rows=ring_rows,
            )  # fmt: skip
            run([compressed.keep_rows], record, self.nth)
        return [out[starts[i] : starts[i + 1]] for i in range(len(chunks))]

    def expected(self, seq: int) -> np.ndarray:
        """The naive result of a whole sequence."""
        made = {}
        for name, width in self.width.items():
            rows, half = self.rows[name][seq].astype(np.float64), self.per_row * width
            made[name] = reference.entries(
                rows[:, :half], rows[:, half:], self.ape[name], self.ratio, self.overlap, self.norm[name], EPSILON, self.angles
            )
        out = np.zeros((LENGTH, HEADS, WIDTH))
        for p in range(LENGTH):
            n = (p + 1) // self.ratio
            chosen = np.arange(n)
            if self.overlap:
                q = self.index_q[seq, p].reshape(INDEX_HEADS, -1).astype(np.float64)
                chosen = reference.best_blocks(q, self.index_weights[seq, p], made["key"][:n], 0.25, TOP)
            rows = np.concatenate([self.x[seq, max(0, p + 1 - WINDOW) : p + 1], made["entry"][chosen]])
            out[p] = reference.attend(self.q[seq, p].reshape(HEADS, -1), rows, 0.2, self.sinks)
        return out.reshape(LENGTH, -1)


@pytest.mark.parametrize("ratio", [4, 32])
def test_sequences_in_pieces(ratio):
    results = []
    for cuts, nth in (([50, 100], 1), ([1, 2, 3, 4, 5, 33, 34, 97, 120], 3), (list(range(60, 100, 1)), 2)):
        layer, ends = Layer(ratio, nth), [0, *cuts, LENGTH]
        pieces: dict[int, list[np.ndarray]] = {0: [], 1: []}
        for first, last in itertools.pairwise(ends):
            both = layer.step([(1, first, last), (0, first, last)])
            pieces[1].append(both[0])
            pieces[0].append(both[1])
        results.append(np.stack([np.concatenate(pieces[seq]) for seq in (0, 1)]))
    alone = Layer(ratio, 1)
    assert np.array_equal(alone.step([(0, 0, LENGTH)])[0], results[0][0])
    expected = np.stack([alone.expected(0), alone.expected(1)])
    assert np.abs(results[0] - expected).max() < 2e-5
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_equal_scores_go_to_the_earlier_block():
    n, top, blocks = 2, 6, 40
    rng = np.random.default_rng(0)
    scores = rng.integers(-3, 3, (n, blocks)).astype(np.float32)
    ids, n_ids = np.zeros((n, top), np.int32), np.zeros(n, np.int32)
    count, positions = np.array([n], np.int64), np.array([4 * blocks - 1, 4 * 5], np.int32)
    record = pack(
        compressed.SCORE_FIELDS, count=address(count), positions=address(positions), seqs=0, run_starts=0, state_ids=0, state_stride=0, q=0,
        q_stride=0, weights=0, weights_stride=0, n_heads=1, width=16, factor=1.0, ratio=4, top=top, keys=0, scores=address(scores),
        scores_stride=scores.strides[0], ids=address(ids), ids_stride=ids.strides[0], n_ids=address(n_ids),
    )  # fmt: skip
    run([compressed.choose_blocks], record, 2)
    assert n_ids.tolist() == [top, 5]
    assert ids[1, :5].tolist() == [0, 1, 2, 3, 4]
    assert ids[0].tolist() == np.sort(np.argsort(-scores[0], kind="stable")[:top]).tolist()
