"""Vector operations beside numpy: operators, conversions, shuffles, sums, dots, exp. test_lanes.py compares other instruction sets."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from numba import njit

from tests.kernels.probe import dots, exps
from vllm_cpp.kernels import simd
from vllm_cpp.kernels.simd import f32, f32x8, f32x16, i8x16, i32x8, i32x16, load, store, u8x16, u8x64, u16x4, u16x8, u32x8, u64x4, unrolled
from vllm_cpp.kernels.vectors import constant

RNG = np.random.default_rng(3)


def at(array):
    return array.ctypes.data


def applied(function, kind, x, y, out):
    """Store what a function of two vectors makes of x and y."""

    @unrolled
    def store_result(x, y, out):
        store(out, function(load(kind, x), load(kind, y)))

    @njit
    def kernel(x, y, out):
        store_result(x, y, out)

    kernel(at(x), at(y), at(out))
    return out


FLOAT = [operator.add, operator.sub, operator.mul, operator.truediv]
INTEGER = [operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor]


@pytest.mark.parametrize("op", FLOAT, ids=lambda op: op.__name__)
def test_float_operators(op):
    x, y = (RNG.standard_normal(8).astype(np.float32) for _ in range(2))
    np.testing.assert_array_equal(applied(op, f32x8, x, y, np.zeros(8, np.float32)), op(x, y))


@pytest.mark.parametrize("op", INTEGER, ids=lambda op: op.__name__)
def test_integer_operators(op):
    x, y = (RNG.integers(-(2**31), 2**31, 8, np.int64).astype(np.int32) for _ in range(2))
    np.testing.assert_array_equal(applied(op, i32x8, x, y, np.zeros(8, np.int32)), op(x, y))


def test_shifts_follow_the_sign_and_scalars_are_repeated():
    x = np.array([-8, -1, 0, 1, 7, 100, -100, 2**30], np.int32)
    signed, unsigned, scaled = np.zeros(8, np.int32), np.zeros(8, np.uint32), np.zeros(8, np.int32)

    @njit
    def kernel(x, signed, unsigned, scaled, three):
        v = load(i32x8, x)
        store(signed, v >> 1)
        store(unsigned, simd.reinterpret(u32x8, v) >> 1)
        v *= three
        v += 1
        store(scaled, 2 - -v)

    kernel(at(x), at(signed), at(unsigned), at(scaled), np.int32(3))
    np.testing.assert_array_equal(signed, x >> 1)
    np.testing.assert_array_equal(unsigned, x.view(np.uint32) >> 1)
    np.testing.assert_array_equal(scaled, 2 + (3 * x.astype(np.int64) + 1).astype(np.int32))


def test_comparisons_select_and_treat_nan_as_python_does():
    x = np.array([1, np.nan, 3, -4, np.inf, 0, 2, 2], np.float32)
    y = np.array([2, 1, 3, np.nan, 1, -0.0, 1, 2], np.float32)
    for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        chosen = applied(
            lambda a, b, compare=compare: simd.select(compare(a, b), constant(f32x8, 1), 0), f32x8, x, y, np.zeros(8, np.float32)
        )
        np.testing.assert_array_equal(chosen, compare(x, y).astype(np.float32))


def test_sums_are_taken_by_halves():
    x = (RNG.standard_normal(16) * 1e4).astype(np.float32)
    out = np.zeros(2, np.float32)

    @njit
    def kernel(x, out):
        store(out, simd.hsum(load(f32x16, x)))
        store(out + 4, simd.hmax(load(f32x16, x)))

    kernel(at(x), at(out))
    expected = x
    while len(expected) > 1:
        expected = expected[: len(expected) // 2] + expected[len(expected) // 2 :]
    assert out[0] == expected[0]
    assert out[1] == x.max()


def test_conversions_extend_by_sign_wrap_and_truncate():
    signed, unsigned = np.zeros(16, np.int32), np.zeros(16, np.int32)
    x = np.array([-128, -1, 0, 1, 127, *range(11)], np.int8)
    floats = np.array([1.9, -1.9, 300.5, 0, 2.5, -2.5, 1e6, -7], np.float32)
    whole, wrapped = np.zeros(8, np.int32), np.zeros(8, np.uint16)

    @njit
    def kernel(x, signed, unsigned, floats, whole, wrapped):
        store(signed, simd.convert(i32x16, load(i8x16, x)))
        store(unsigned, simd.convert(i32x16, load(u8x16, x)))
        store(whole, simd.convert(i32x8, load(f32x8, floats)))
        store(wrapped, simd.convert(u16x8, load(i32x8, whole)))

    kernel(at(x), at(signed), at(unsigned), at(floats), at(whole), at(wrapped))
    np.testing.assert_array_equal(signed, x)
    np.testing.assert_array_equal(unsigned, x.view(np.uint8))
    np.testing.assert_array_equal(whole, floats.astype(np.int32))
    np.testing.assert_array_equal(wrapped, whole.astype(np.uint16))


def test_bytes_are_cut_out_of_words_and_their_bits_made_even():
    words = RNG.integers(0, 2**63, 4, np.uint64)
    places = [0, 7, 14, 21, 29, 41, 48, 56]
    cut, even = np.zeros((4, 8), np.uint8), np.zeros((4, 8), np.uint8)

    @unrolled
    def store_bytes(words, cut, even):
        found = simd.bytes_at(load(u64x4, words), places)
        store(cut, found)
        store(even, simd.with_even_bits(found))

    @njit
    def kernel(words, cut, even):
        store_bytes(words, cut, even)

    kernel(at(words), at(cut), at(even))
    np.testing.assert_array_equal(cut, words[:, None] >> np.array(places, np.uint64) & np.uint64(255))
    np.testing.assert_array_equal(even & 127, cut & 127)
    assert (np.unpackbits(even, axis=1).reshape(-1, 8).sum(1) % 2 == 0).all()


def test_dots_are_exact_at_the_ends_of_their_ranges():
    for _ in range(20):
        u = RNG.choice(np.array([0, 1, 126, 127], np.uint8), 64)
        s, x = (RNG.choice(np.array([-127, -1, 0, 1, 127], np.int8), 64) for _ in range(2))
        out = RNG.integers(-1000, 1000, 80, np.int32)
        before = out.astype(np.int64)
        dots(at(u), at(s), at(x), at(out))
        by_four = (u.astype(int) * s).reshape(-1, 4).sum(1)
        signed = (x.astype(int) * s).reshape(-1, 4).sum(1)
        by_two = (x.view(np.int16).astype(int) * s.view(np.int16)).reshape(-1, 2).sum(1)
        np.testing.assert_array_equal(out[:16], before[:16] + by_four)
        np.testing.assert_array_equal(out[16:32], before[16:32] + signed)
        np.testing.assert_array_equal(out[32:40], by_four[:8])
        np.testing.assert_array_equal(out[40:48], signed[:8])
        np.testing.assert_array_equal(out[48:64], (before[48:64] + by_two).astype(np.int32))
        np.testing.assert_array_equal(out[64:].view(np.int16), (u.astype(int) * s).reshape(-1, 2).sum(1))


def test_halves_round_to_even_and_keep_denormals():
    x = np.concatenate(
        [(RNG.standard_normal(4096) * 10.0 ** RNG.integers(-9, 6, 4096)).astype(np.float32), np.float32([0, -0.0, np.inf, 65520])]
    )
    x = np.concatenate([x, np.arange(2048, 4096 + 8, dtype=np.float32) + 0.5])[: len(x) // 8 * 8]
    out, back, rounded = np.zeros(len(x), np.uint16), np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)

    @njit
    def kernel(x, out, back, rounded, n):
        for i in range(0, n, 8):
            simd.store_half(out + 2 * i, load(f32x8, x + 4 * i))
            store(back + 4 * i, simd.load_half(f32x8, out + 2 * i))
        for i in range(n):
            store(rounded + 4 * i, simd.round_half(load(f32, x + 4 * i)))

    kernel(at(x), at(out), at(back), at(rounded), len(x))
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(out, expected.view(np.uint16))
    np.testing.assert_array_equal(back, expected.astype(np.float32))
    np.testing.assert_array_equal(rounded, back)


def test_bfloats_round_to_even_and_stay_nan():
    x = np.concatenate(
        [RNG.standard_normal(1000).astype(np.float32), np.float32([np.nan, np.inf, -np.inf, 0, 1.00390625, 1.01171875, 3e38, -1e-40])]
    )
    out, back = np.zeros(len(x), np.uint16), np.zeros(len(x), np.float32)

    @njit
    def kernel(x, out, back, n):
        for i in range(0, n, 8):
            simd.store_bfloat(out + 2 * i, load(f32x8, x + 4 * i))
            store(back + 4 * i, simd.load_bfloat(f32x8, out + 2 * i))

    kernel(at(x), at(out), at(back), len(x))
    bits = x.view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(out[finite], expected[finite])
    assert np.isnan(back[~finite]).all()
    np.testing.assert_array_equal(back.view(np.uint32) >> 16, out)


def test_exp_is_close_and_the_same_for_one_number_as_for_many():
    x = np.concatenate([np.linspace(-106, 90, 1 << 16), [np.nan, np.inf, -np.inf, 0, -0.0, 88.7, 88.8, -87.4] * 2]).astype(np.float32)
    many, single = np.zeros_like(x), np.zeros_like(x)

    @njit
    def one_by_one(x, out, n):
        for i in range(n):
            store(out + 4 * i, simd.exp(load(f32, x + 4 * i)))

    exps(at(x), at(many), len(x))
    one_by_one(at(x), at(single), len(x))
    np.testing.assert_array_equal(many.view(np.uint32), single.view(np.uint32))
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64))
        expected = exact.astype(np.float32)
    inside = np.isfinite(expected)
    assert (np.abs(many[inside] - exact[inside]) <= 1.3 * np.spacing(expected[inside])).all()
    np.testing.assert_array_equal(many[~inside], expected[~inside])


def test_softplus_is_close_and_the_same_for_one_number_as_for_many():
    x = np.concatenate([np.linspace(-100, 30, 1 << 16), np.linspace(-1, 1, 1 << 16), [np.nan, np.inf, -np.inf, 0, -0.0, 1e30, -80, 20] * 2])
    x = x.astype(np.float32)
    many, single = np.zeros_like(x), np.zeros_like(x)

    @njit
    def answers(x, many, single, n):
        for i in range(0, n, 16):
            store(many + 4 * i, simd.softplus(load(f32x16, x + 4 * i)))
        for i in range(n):
            store(single + 4 * i, simd.softplus(load(f32, x + 4 * i)))

    answers(at(x), at(many), at(single), len(x))
    np.testing.assert_array_equal(many.view(np.uint32), single.view(np.uint32))
    with np.errstate(invalid="ignore"):
        exact = np.logaddexp(0, x.astype(np.float64))
    expected = exact.astype(np.float32)
    inside = np.isfinite(expected)
    assert (np.abs(many[inside] - exact[inside]) <= 2 * np.spacing(expected[inside])).all()
    np.testing.assert_array_equal(many[~inside], expected[~inside])


def test_shuffles_tables_and_masks():
    x = RNG.integers(0, 256, 64).astype(np.uint8)
    table = RNG.integers(-128, 128, 16).astype(np.int8)
    index = RNG.integers(0, 16, 64).astype(np.uint8)
    bits = RNG.integers(0, 65536, 4).astype(np.uint16)
    reversed_bytes, looked_up, masked = np.zeros(64, np.uint8), np.zeros(64, np.int8), np.zeros(64, np.uint8)

    @unrolled
    def everything(x, table, index, bits, reversed_bytes, looked_up, masked):
        v = load(u8x64, x)
        store(reversed_bytes, simd.shuffle(v, range(63, -1, -1)))
        store(looked_up, simd.table16(load(i8x16, table), load(u8x64, index)))
        store(masked, simd.select(simd.bit_masks(load(u16x4, bits), [(2, 0, 3, 1)])[0], simd.opaque(v), constant(u8x64, 99)))

    @njit
    def kernel(x, table, index, bits, reversed_bytes, looked_up, masked):
        everything(x, table, index, bits, reversed_bytes, looked_up, masked)

    kernel(at(x), at(table), at(index), at(bits), at(reversed_bytes), at(looked_up), at(masked))
    np.testing.assert_array_equal(reversed_bytes, x[::-1])
    np.testing.assert_array_equal(looked_up, table[index])
    np.testing.assert_array_equal(masked, np.where(np.unpackbits(bits[[2, 0, 3, 1]].view(np.uint8), bitorder="little"), x, 99))


def test_atomics_and_hints():
    words = np.array([5, 0], np.int64)

    @njit
    def kernel(words):
        before = simd.atomic_add(words, 3)
        simd.atomic_store(words + 8, simd.atomic_load(words) + before)
        simd.pause()
        simd.sched_yield()
        simd.prefetch(0)

    kernel(at(words))
    np.testing.assert_array_equal(words, [8, 13])


def test_mixing_vector_types_is_refused():
    @njit
    def kernel(x):
        return load(f32x8, x) + load(i32x8, x)

    with pytest.raises(Exception, match=r"convert\(\) or reinterpret\(\)"):
        kernel(0)
