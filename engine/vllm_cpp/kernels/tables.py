"""Look-ups in constant tables of points: an index stands for a few byte values that are the same for every weight.

Owns how such a table gets into compiled code, as a part of it: an address of this process would be wrong in the next one, which loads the
code from the kernel cache. Picks the look-up that suits the CPU, with one meaning on all of them: where a table can be permuted in
registers, points of few different values are looked up in a compressed form, whole vectors at once; elsewhere they are loaded one by
one. Must not know encodings.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from vllm_cpp.kernels.simd import (
    bytes_at,
    convert,
    f32,
    f64,
    i64,
    in_order,
    join,
    load,
    opaque,
    pack,
    reinterpret,
    select,
    shuffle,
    u8x64,
    u16x32,
    u64,
    u64x8,
)
from vllm_cpp.kernels.vectors import Value, VecType, builder, constant, features, llvm_type

# More chunks than this of a table take longer to permute than points take to load.
MOST_CHUNKS = 8


class Points:
    """A table u8 [n, width] of what the values of each point are where their bit is clear; where it is set, `other` of that: a function of
    a number or a Value. `width` is 4 or 8, n a power of two of at least 256."""

    def __init__(self, table: np.ndarray, other: Callable[[Any], Any]):
        self.table = table.astype(np.uint8)
        self.other = other
        self.n, self.width = self.table.shape
        self.values, codes = np.unique(self.table, return_inverse=True)
        self.bits = (len(self.values) - 1).bit_length()
        # point -> its values' codes, the first lowest
        self.packed = (codes.reshape(self.table.shape) << (self.bits * np.arange(self.width))).sum(1)

    def look_up(self, index: Value, bits: Value, numbers: Iterator[Value] | None = None) -> Iterator[Value]:
        """The values of 256 // width indices (unsigned), one after another, as four u8x64; `bits` is u8x32, a bit for each value. Each is
        looked up when it is asked for. `numbers` are the indices one by one, where they can be loaded so."""
        permutable = self.bits * self.width <= 16 and self.n <= MOST_CHUNKS * 2 * index.type.lanes
        if permutable and "avx512vbmi" in features():
            return self._permuted(index, bits)
        return self._loaded(numbers or self._numbers(index), bits)

    def _numbers(self, index: Value) -> Iterator[Value]:
        width = index.type.element.bitwidth
        words = reinterpret(VecType(u64, index.type.lanes * width // 64), index)
        for word in [words[i] for i in range(words.type.lanes)]:
            for shift in range(0, 64, width):
                yield word >> shift & (1 << width) - 1

    def _loaded(self, numbers: Iterator[Value], bits: Value) -> Iterator[Value]:
        kind, table = f64 if self.width == 8 else f32, self._address()
        bit_of_lane = constant(u8x64, [1 << lane % 8 for lane in range(64)])
        for j in range(4):
            # as floats, because LLVM knows how to load one of those into the upper half of a register
            points = [load(kind, table + convert(i64, number) * self.width) for number in itertools.islice(numbers, 64 // self.width)]
            values = reinterpret(u8x64, pack(points))
            mask = shuffle(bits, [8 * j + lane // 8 for lane in range(64)]) & bit_of_lane
            yield select(mask == bit_of_lane, self.other(values), values)
            in_order()

    def _address(self) -> Value:
        """Of the table, which becomes a constant of the module that is being built."""
        b = builder()
        data = bytearray(self.table.tobytes())
        name = f"points.{hashlib.sha256(data).hexdigest()[:16]}"
        table = b.module.globals.get(name)
        if table is None:
            table = ir.GlobalVariable(b.module, ir.ArrayType(ir.IntType(8), len(data)), name)
            table.initializer = ir.Constant(table.value_type, data)
            table.global_constant, table.linkage, table.align = True, "internal", 64
        return Value(i64, b.ptrtoint(table, ir.IntType(64)))

    def _permuted(self, index: Value, bits: Value) -> Iterator[Value]:
        bits = join(bits, bits)
        if self.width == 8:
            words = reinterpret(u8x64, self._chosen(convert(u16x32, index), index, self.packed, "hi"))
            # 64 bits for a point: 16 of codes, then those of its values
            lanes = [[lane for p in range(8 * j, 8 * j + 8) for lane in (2 * p, 2 * p + 1, *[64 + p] * 6)] for j in range(4)]
            points = [shuffle(words, of, bits) for of in lanes]
            apart, bits_at = points, 16
        else:
            planes = [self._chosen(convert(u8x64, index), index, self.packed >> shift & 255, "qi") for shift in (0, 8)]
            # 64 bits for two points of 16; those of their values apart
            lanes = [[lane + p for p in range(16 * j, 16 * j + 16) for lane in (0, 64) * 2] for j in range(4)]
            points = [shuffle(planes[0], of, planes[1]) for of in lanes]
            apart, bits_at = [shuffle(bits, [8 * j + lane // 8 for lane in range(64)]) for j in range(4)], 8
        code_places = [8 * self.width * (i // self.width) + self.bits * (i % self.width) for i in range(8)]
        bit_places = [bits_at + i - self.bits for i in range(8)]
        n_codes = 2**self.bits
        meanings = [int(self.values[code % len(self.values)]) for code in range(n_codes)]
        meanings = constant(u8x64, (meanings + [self.other(value) for value in meanings]) * (32 // n_codes))
        # as a number LLVM knows, it would become two, for one instruction more
        of_codes = opaque(constant(u8x64, n_codes - 1))
        for point, bit in zip(points, apart, strict=True):
            codes, above = bytes_at(reinterpret(u64x8, point), code_places), bytes_at(reinterpret(u64x8, bit), bit_places)
            # what stands above code and bit is not looked at
            yield _call("llvm.x86.avx512.permvar.qi.512", meanings, ((codes ^ above) & of_codes) ^ above)

    def _chosen(self, codes: Value, index: Value, table: np.ndarray, letters: str) -> Value:
        """table[index], by permutations of two registers each and the bits of the index above those they look at."""
        lanes = codes.type.lanes
        parts = [constant(codes.type, table[start : start + lanes]) for start in range(0, self.n, lanes)]
        parts = [
            _call(f"llvm.x86.avx512.vpermi2var.{letters}.512", low, codes, high) for low, high in zip(parts[::2], parts[1::2], strict=True)
        ]
        bit = 2 * lanes
        while len(parts) > 1:
            parts = [select((index & bit) != 0, high, low) for low, high in zip(parts[::2], parts[1::2], strict=True)]
            bit *= 2
        return parts[0]


def _call(name: str, *args: Value) -> Value:
    """An instruction that gives what its first argument is."""
    kind = llvm_type(args[0].type)
    function = cgutils.get_or_insert_function(builder().module, ir.FunctionType(kind, [kind] * len(args)), name)
    return Value(args[0].type, builder().call(function, [arg.ir for arg in args]))
