"""Rope: frequencies equal the recipe's, turned heads within 2e-6 of the naive form, keys and values land in their blocks, threads change
nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.paged import MAX_TOKENS, Paged, address, run
from tests.reference import ops
from vllm_cpp.kernels.cpu import rope
from vllm_cpp.kernels.cpu.kv_cache import KvLayout
from vllm_cpp.kernels.records import pack

EPS = 1e-6


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({}, {}),
        ({"scaling": "none", "factor": 4.0}, {}),
        ({"scaling": "linear", "factor": 4.0}, {"factor": 4.0}),
        ({"scaling": "yarn", "factor": 8.0, "original_context": 4096}, {"factor": 8.0, "yarn": (4096, 32.0, 1.0)}),
        (
            {"scaling": "yarn", "factor": 4.0, "original_context": 64, "beta_fast": 8.0, "beta_slow": 2.0, "log_multiplier": 0.0},
            {"factor": 4.0, "yarn": (64, 8.0, 2.0)},
        ),
        ({"divisors": np.linspace(1, 8, 32)}, {"divisors": np.linspace(1, 8, 32)}),
    ],
)
def test_frequencies(options, recipe):
    angles, magnitude = rope.rope_frequencies(64, 10000.0, **options)
    assert np.allclose(angles, ops.rope_angles(32, 10000.0, **recipe), rtol=1e-12)
    assert magnitude == pytest.approx(1 + 0.1 * np.log(options["factor"]) if options.get("scaling") == "yarn" else 1.0)


def test_magnitude_takes_the_files_factor_too():
    assert rope.rope_frequencies(8, 10000.0, scaling="yarn", factor=2.0, original_context=100, attn_factor=0.5)[1] == pytest.approx(
        0.5 + 0.05 * np.log(2)
    )


@pytest.mark.parametrize(("multiplier", "magnitude"), [(1.0, 1.0), (0.5, (1 + 0.1 * np.log(8)) / (1 + 0.05 * np.log(8)))])
def test_log_multiplier_takes_magnitude_back(multiplier, magnitude):
    options = {"scaling": "yarn", "factor": 8.0, "original_context": 100, "log_multiplier": multiplier}
    assert rope.rope_frequencies(8, 10000.0, **options)[1] == pytest.approx(magnitude)


def test_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="longrope"):
        rope.rope_frequencies(8, 10000.0, scaling="longrope")


def turn(heads, kv_heads, d, half, layout, norm, dtype="f16", nth=1):
    """Turn some tokens of two sequences; what came out, and what went in."""
    rng = np.random.default_rng(9)
    paged = Paged(KvLayout(kv_heads, d, 16, dtype), [40, 5000], rng)
    tokens = [(0, p) for p in range(10, 33)] + [(1, 4999)]
    n = len(tokens)
    paged.step(tokens)
    q, k, v = (rng.standard_normal((n, width)).astype(np.float32) * 2 for width in (heads * d + 1, kv_heads * d, kv_heads * d + 2))
    before = q.copy(), k.copy(), v.copy()
    weights = [rng.standard_normal(d).astype(np.float32) for _ in "qk"] if norm else [None, None]
    frequencies, magnitude = rope.rope_frequencies(2 * half, 10000.0, scaling="yarn", factor=2.0, original_context=512)
    table = np.zeros((MAX_TOKENS, 2 * half), np.float32)
    table_record = pack(
        rope.ROPE_TABLE_FIELDS,
        count=address(paged.count), positions=address(paged.positions), frequencies=address(frequencies), half=half, magnitude=magnitude,
        table=address(table), table_stride=table.strides[0],
    )  # fmt: skip
    record = pack(
        rope.ROPE_STORE_FIELDS,
        count=address(paged.count), q=address(q), q_stride=q.strides[0], q_head_stride=4 * d, k=address(k), k_stride=k.strides[0],
        v=address(v), v_stride=v.strides[0], n_heads=heads, n_kv_heads=kv_heads, head_dim=d, value_length=d, layout=layout,
        half=half, table=address(table),
        table_stride=table.strides[0], q_norm=address(weights[0]), k_norm=address(weights[1]), eps=EPS,
        positions=address(paged.positions), seqs=address(paged.seqs), kv_format=paged.layout.kv_format, k_bytes=paged.layout.k_bytes,
        v_bytes=paged.layout.v_bytes, **paged.fields(),
    )  # fmt: skip
    run([rope.rope_table], table_record, nth)
    run([rope.rope_store], record, nth)
    return paged, tokens, (q, k, v), before, weights, (frequencies, magnitude)


@pytest.mark.parametrize("layout", [rope.NEOX, rope.NEIGHBOURS])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "half", "norm", "dtype"),
    [
        (6, 2, 64, 32, False, "f16"),
        (4, 4, 128, 32, True, "f16"),
        (3, 1, 40, 20, True, "f32"),
        (2, 2, 24, 6, False, "f32"),
        (6, 2, 64, 32, False, "q8_0"),
        (3, 1, 40, 20, True, "q8_0"),
    ],
)
def test_turned_and_stored(layout, heads, kv_heads, d, half, norm, dtype):
    paged, tokens, (q, k, v), before, weights, (angles, magnitude) = turn(heads, kv_heads, d, half, layout, norm, dtype, nth=3)
    positions, n = [p for _, p in tokens], len(tokens)
    for found, given, n_heads, weight in ((q, before[0], heads, weights[0]), (k, before[1], kv_heads, weights[1])):
        x = given[:, : n_heads * d].reshape(n, n_heads, d)
        x = x if weight is None else ops.rmsnorm(x, weight, EPS)
        expected = ops.rope(x, positions, angles, magnitude, layout == rope.NEIGHBOURS)
        assert np.abs(found[:, : n_heads * d].reshape(n, n_heads, d) - expected).max() <= 2e-6 * np.abs(expected).max()
        assert np.array_equal(found[:, n_heads * d :], given[:, n_heads * d :])
    assert np.array_equal(v, before[2])
    naive = Paged(paged.layout, [40, 5000], np.random.default_rng(9))
    for t, (seq, position) in enumerate(tokens):
        naive.write(seq, position, k[t].reshape(kv_heads, d), v[t, : kv_heads * d].reshape(kv_heads, d))
    # every byte, those of places that no token has among them
    assert np.array_equal(paged.k_cache.view(np.uint8), naive.k_cache.view(np.uint8))
    assert np.array_equal(paged.v_cache.view(np.uint8), naive.v_cache.view(np.uint8))


@pytest.mark.parametrize("layout", [rope.NEOX, rope.NEIGHBOURS])
def test_threads_change_no_bit(layout):
    one = turn(6, 2, 40, 20, layout, norm=True)[2]
    for nth in (2, 3, 5):
        assert all(np.array_equal(a, b) for a, b in zip(turn(6, 2, 40, 20, layout, norm=True, nth=nth)[2], one, strict=True))


def store_only(kv_heads, d, dv, dtype, shared):
    """k and v of some tokens stored as they stand; `shared`: values are the first of a key."""
    rng = np.random.default_rng(4)
    layout = KvLayout(kv_heads, d, 16, dtype, dv)
    paged, naive = (Paged(layout, [40, 70], np.random.default_rng(9)) for _ in range(2))
    tokens = [(0, p) for p in range(10, 33)] + [(1, 69)]
    paged.step(tokens)
    k = rng.standard_normal((len(tokens), kv_heads * d)).astype(np.float32)
    v = k if shared else rng.standard_normal((len(tokens), kv_heads * dv)).astype(np.float32)
    unused = dict.fromkeys(("q", "q_stride", "q_head_stride", "n_heads", "layout", "half", "table", "table_stride", "q_norm", "k_norm"), 0)
    record = pack(
        rope.ROPE_STORE_FIELDS,
        count=address(paged.count), k=address(k), k_stride=k.strides[0], v=address(v), v_stride=v.strides[0], n_kv_heads=kv_heads,
        head_dim=d, value_length=dv, eps=0.0, positions=address(paged.positions), seqs=address(paged.seqs), kv_format=layout.kv_format,
        k_bytes=layout.k_bytes, v_bytes=layout.v_bytes, **unused, **paged.fields(),
    )  # fmt: skip
    run([rope.rope_store], record, nth=3)
    for t, (seq, position) in enumerate(tokens):
        naive.write(seq, position, k[t].reshape(kv_heads, d), v[t, : kv_heads * dv].reshape(kv_heads, dv))
    return paged, naive


@pytest.mark.parametrize("dtype", ["f16", "f32", "q8_0"])
@pytest.mark.parametrize(("kv_heads", "d", "dv", "shared"), [(3, 40, 24, False), (1, 72, 40, True), (2, 16, 64, False)])
def test_only_stored(kv_heads, d, dv, shared, dtype):
    paged, naive = store_only(kv_heads, d, dv, dtype, shared)
    assert np.array_equal(paged.k_cache.view(np.uint8), naive.k_cache.view(np.uint8))
    assert np.array_equal(paged.v_cache.view(np.uint8), naive.v_cache.view(np.uint8))


def turned_heads(x, *, n_heads, length, first, half, layout, backwards, norm, weight, nth=1, elsewhere=False):
    """rope.turn_heads over a copy of x [tokens, n_heads, step], in place or to other rows; and the frequencies."""
    n, out = len(x), x.copy()
    given = x if elsewhere else out
    count, positions = np.full(1, n, np.int64), np.arange(n, dtype=np.int32) * 37
    frequencies, magnitude = rope.rope_frequencies(2 * half, 10000.0, scaling="yarn", factor=2.0, original_context=512)
    table = np.zeros((n, 2 * half + 4), np.float32)
    table_record = pack(
        rope.ROPE_TABLE_FIELDS,
        count=address(count), positions=address(positions), frequencies=address(frequencies), half=half, magnitude=magnitude,
        table=address(table), table_stride=table.strides[0],
    )  # fmt: skip
    record = pack(
        rope.TURN_HEADS_FIELDS,
        count=address(count), x=address(given), x_stride=given.strides[0], head_stride=given.strides[1], out=address(out),
        out_stride=out.strides[0], out_head_stride=out.strides[1], n_heads=n_heads, length=length,
        normed=norm, norm=address(weight), eps=EPS, layout=layout, half=half, first=first, backwards=backwards, table=address(table),
        table_stride=table.strides[0],
    )  # fmt: skip
    run([rope.rope_table], table_record, nth)
    run([rope.turn_heads], record, nth)
    return out, positions, frequencies, magnitude


@pytest.mark.parametrize("layout", [rope.NEOX, rope.NEIGHBOURS])
@pytest.mark.parametrize(
    ("length", "first", "half", "norm", "weighted", "backwards"),
    [
        (48, 0, 24, False, False, False),
        (48, 16, 16, False, False, True),
        (40, 28, 6, True, True, False),
        (64, 0, 32, True, False, False),
        (64, 0, 0, True, False, False),
    ],
)
def test_heads_normed_and_turned_anywhere(layout, length, first, half, norm, weighted, backwards):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((7, 5, length + 3)).astype(np.float32) * 3
    weight = rng.standard_normal(length).astype(np.float32) if weighted else None
    options = {
        "n_heads": 5, "length": length, "first": first, "half": half, "layout": layout, "backwards": backwards, "norm": norm,
        "weight": weight,
    }  # fmt: skip
    found, positions, angles, magnitude = turned_heads(x, **options)
    expected = np.array(x, np.float64)
    if norm:
        expected[..., :length] = ops.rmsnorm(x[..., :length], 1.0 if weight is None else weight, EPS)
    part = expected[..., first:length]
    part[...] = ops.rope(part, positions, -angles if backwards else angles, magnitude, layout == rope.NEIGHBOURS)
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()
    assert np.array_equal(found[..., length:], x[..., length:])
    for nth in (2, 5):
        assert np.array_equal(turned_heads(x, **options, nth=nth, elsewhere=norm)[0], found)
