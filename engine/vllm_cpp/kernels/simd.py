"""Operations on vector values: memory, conversions, shuffles, sums, integer dots, exp.

Owns every instruction-set decision: each operation picks the best lowering for the CPU that numba compiles for and keeps one meaning on
all of them, so kernels never ask what the CPU is (`lane()` is for reports and tests). Everything marked `@unrolled` can be called from
compiled kernels and from other unrolled functions; types are passed by name, as in `load(f32x8, address)`. Addresses are int64 and
need no alignment. Must not know encodings, models or threads.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from vllm_cpp.kernels.vectors import (
    Value,
    VecType,
    builder,
    cast_llvm,
    coerce,
    common_type,
    constant,
    element_of,
    features,
    llvm_type,
    unrolled,
    with_element,
)

i8, u8, i16, u16 = types.int8, types.uint8, types.int16, types.uint16
i32, u32, i64, u64 = types.int32, types.uint32, types.int64, types.uint64
f32, f64 = types.float32, types.float64

i8x16, i8x32, i8x64 = (VecType(i8, n) for n in (16, 32, 64))
u8x4, u8x8, u8x16, u8x32, u8x64 = (VecType(u8, n) for n in (4, 8, 16, 32, 64))
i16x16, i16x32 = (VecType(i16, n) for n in (16, 32))
u16x4, u16x8, u16x16, u16x32, u16x64 = (VecType(u16, n) for n in (4, 8, 16, 32, 64))
i32x4, i32x8, i32x16 = (VecType(i32, n) for n in (4, 8, 16))
u32x4, u32x8, u32x16 = (VecType(u32, n) for n in (4, 8, 16))
u64x4, u64x8 = (VecType(u64, n) for n in (4, 8))
f32x4, f32x8, f32x16 = (VecType(f32, n) for n in (4, 8, 16))
f64x16 = VecType(f64, 16)

_VNNI_512 = "avx512vnni"
_I32 = ir.IntType(32)


class _BFloatType(ir.HalfType):
    """llvmlite knows no bf16."""

    def __str__(self) -> str:
        return "bfloat"


_BFLOAT = _BFloatType()


def lane() -> str:
    """Which family of integer dots is in use: "vnni", "avx2", "dotprod" or "generic"."""
    have = features()
    if (_VNNI_512 in have and "avx512vl" in have) or "avxvnni" in have:
        return "vnni"
    return next((name for name in ("avx2", "dotprod") if name in have), "generic")


def _call(name: str, returns: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
    b = builder()
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(returns, [a.type for a in args]), name)
    return b.call(function, args)


def _overloaded(name: str, kind: types.Type, *args: Value) -> Value:
    """An LLVM intrinsic that exists for every shape, named by suffix (`llvm.fma.v8f32`)."""
    element = element_of(kind)
    letter = "f" if isinstance(element, types.Float) else "i"
    lanes = f"v{kind.lanes}" if isinstance(kind, VecType) else ""
    return Value(kind, _call(f"llvm.{name}.{lanes}{letter}{element.bitwidth}", llvm_type(kind), [a.ir for a in args]))


# ---- memory


def _pointer(address: Any, to: ir.Type) -> ir.Value:
    return builder().inttoptr(coerce(address, i64).ir, to.as_pointer())


def _load_llvm(address: Any, kind: ir.Type) -> ir.Value:
    return builder().load(_pointer(address, kind), align=1)


@unrolled
def load(kind: types.Type, address: Any) -> Value:
    return Value(kind, _load_llvm(address, llvm_type(kind)))


@unrolled
def store(address: Any, value: Value) -> None:
    builder().store(value.ir, _pointer(address, value.ir.type), align=1)


@unrolled
def load_half(kind: types.Type, address: Any) -> Value:
    """f16 numbers as f32 (scalar or vector), exactly, denormals included; a signalling NaN may come out quiet."""
    return half_to_float(load(with_element(kind, u16), address))


def _has_half() -> bool:
    return "f16c" in features() or "neon" in features()


@unrolled
def half_to_float(bits: Value) -> Value:
    """f16 bit patterns (u16) as f32."""
    if not _has_half():
        return half_bits_to_float(bits)
    half = ir.VectorType(ir.HalfType(), bits.type.lanes) if isinstance(bits.type, VecType) else ir.HalfType()
    kind = with_element(bits.type, f32)
    return Value(kind, builder().fpext(builder().bitcast(bits.ir, half), llvm_type(kind)))


def half_bits_to_float(bits: Value) -> Value:
    """f16 bit patterns (u16) as f32 by integer steps: without F16C, LLVM would call a function numba cannot find and abort."""
    kind = with_element(bits.type, f32)
    wide = convert(with_element(bits.type, u32), bits)
    magnitude = reinterpret(kind, (wide & 0x7FFF) << 13) * constant(kind, 2.0**112)
    infinite = (wide & 0x7C00) == 0x7C00
    unsigned = select(infinite, reinterpret(wide.type, magnitude) | 0x7F800000, reinterpret(wide.type, magnitude))
    return reinterpret(kind, unsigned | ((wide & 0x8000) << 16))


@unrolled
def store_half(address: Any, value: Value) -> None:
    """f32 numbers stored as f16, rounded to the nearest, ties to even."""
    if _has_half():
        half = ir.VectorType(ir.HalfType(), value.type.lanes) if isinstance(value.type, VecType) else ir.HalfType()
        narrow = builder().fptrunc(value.ir, half)
        builder().store(narrow, _pointer(address, half), align=1)
    else:
        store(address, float_to_half_bits(value))


def float_to_half_bits(value: Value) -> Value:
    """The u16 bit patterns of f32 numbers rounded to f16: scaling through the f32 adder does the rounding and the denormals."""
    bits = reinterpret(with_element(value.type, u32), value)
    doubled = bits + bits
    bias = maximum(doubled & 0xFF000000, constant(bits.type, 0x71000000))
    magnitude = reinterpret(value.type, bits & 0x7FFFFFFF)
    scaled = (magnitude * constant(value.type, 2.0**112)) * constant(value.type, 2.0**-110)
    rounded = reinterpret(bits.type, reinterpret(value.type, (bias >> 1) + 0x07800000) + scaled)
    unsigned = ((rounded >> 13) & 0x7C00) + (rounded & 0xFFF)
    result = select(doubled > 0xFF000000, constant(bits.type, 0x7E00), unsigned) | ((bits >> 16) & 0x8000)
    return convert(with_element(bits.type, u16), result)


@unrolled
def round_half(value: Value) -> Value:
    """f32 numbers rounded to what f16 can hold."""
    if _has_half():
        half = ir.VectorType(ir.HalfType(), value.type.lanes) if isinstance(value.type, VecType) else ir.HalfType()
        return Value(value.type, builder().fpext(builder().fptrunc(value.ir, half), value.ir.type))
    return half_bits_to_float(float_to_half_bits(value))


@unrolled
def load_bfloat(kind: types.Type, address: Any) -> Value:
    """bf16 numbers as f32: the upper half of the bit pattern."""
    return reinterpret(kind, convert(with_element(kind, u32), load(with_element(kind, u16), address)) << 16)


@unrolled
def store_bfloat(address: Any, value: Value) -> None:
    """f32 numbers stored as bf16, rounded to the nearest, ties to even; NaN stays NaN."""
    store(address, convert(with_element(value.type, u16), _bfloat_bits(value)))


@unrolled
def round_bfloat(value: Value) -> Value:
    """f32 numbers rounded to what bf16 can hold."""
    return reinterpret(value.type, _bfloat_bits(value) << 16)


def _bfloat_bits(value: Value) -> Value:
    bits = reinterpret(with_element(value.type, u32), value)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 64
    return select((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded)


@unrolled
def prefetch(address: Any, level: int = 1) -> None:
    """Ask for the cache line, into the first or the second cache level; an address outside every mapping is harmless."""
    pointer = _pointer(address, ir.IntType(8))
    _call("llvm.prefetch.p0", ir.VoidType(), [pointer, _I32(0), _I32(4 - level), _I32(1)])


def in_order() -> None:
    """The compiler moves no load or store past this point; the CPU may (unrolled functions only). Without it, LLVM would first do every
    load that is possible and then be out of registers."""
    builder().fence("acq_rel", "singlethread")


def wide_registers() -> bool:
    """Whether vectors of 64 bytes fit a register, bytes and 16-bit lanes too; there are 32 of them then."""
    return "avx512bw" in features()


def sums_at_once(rows: int, vectors: int) -> tuple[int, int]:
    """How many of `rows` rows and `vectors` 16-lane vectors of f32 sums an inner product keeps in registers, with room for what it adds
    to them."""
    if "avx512f" in features():
        return rows, vectors
    return min(rows, 4), vectors if rows <= 2 else 1


def stack_bytes(count: int) -> Value:
    """Address of `count` bytes in the calling kernel's stack frame, 64-byte aligned, not cleared (unrolled functions only)."""
    b = builder()
    with b.goto_entry_block():
        space = b.alloca(ir.IntType(8), size=ir.Constant(_I32, count))
        space.align = 64
    return Value(i64, b.ptrtoint(space, ir.IntType(64)))


# ---- threads


@unrolled
def atomic_add(address: Any, amount: Any) -> Value:
    """The int64 before the addition; acquires and releases."""
    return Value(i64, builder().atomic_rmw("add", _pointer(address, ir.IntType(64)), coerce(amount, i64).ir, "acq_rel"))


@unrolled
def atomic_load(address: Any) -> Value:
    return Value(i64, builder().load_atomic(_pointer(address, ir.IntType(64)), "acquire", 8))


@unrolled
def atomic_store(address: Any, value: Any) -> None:
    builder().store_atomic(coerce(value, i64).ir, _pointer(address, ir.IntType(64)), "release", 8)


@unrolled
def atomic_replace(address: Any, old: Any, new: Any) -> Value:
    """Store `new` (int64) if `old` stands there; whether it did. Acquires and releases."""
    b = builder()
    pair = b.cmpxchg(_pointer(address, ir.IntType(64)), coerce(old, i64).ir, coerce(new, i64).ir, "acq_rel", "acquire")
    return Value(types.boolean, b.extract_value(pair, 1))


@unrolled
def pause() -> None:
    """Tell the core that this is a spin loop."""
    if "sse2" in features():
        _call("llvm.x86.sse2.pause", ir.VoidType(), [])


@unrolled
def sched_yield() -> None:
    _call("sched_yield", _I32, [])


# ---- shapes and conversions


@unrolled
def zero(kind: types.Type) -> Value:
    return constant(kind, 0)


@unrolled
def splat(kind: types.Type, x: Any) -> Value:
    return coerce(x, kind)


@unrolled
def convert(kind: types.Type, x: Value) -> Value:
    """Number conversion lane by lane: integers extend by the source's sign or wrap, floats truncate to integers."""
    return Value(kind, cast_llvm(x.ir, x.type, kind))


@unrolled
def reinterpret(kind: types.Type, x: Value) -> Value:
    """The same bits under another type."""
    return Value(kind, x.ir if x.ir.type == llvm_type(kind) else builder().bitcast(x.ir, llvm_type(kind)))


def shuffle(x: Value, lanes: Sequence[int], other: Value | None = None) -> Value:
    """Pick lanes by constant numbers; `other`'s lanes count on after `x`'s (unrolled functions only)."""
    picks = ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes))
    y = x if other is None else other
    return Value(VecType(x.type.element, len(lanes)), builder().shuffle_vector(x.ir, y.ir, picks))


@unrolled
def low(x: Value) -> Value:
    return shuffle(x, range(x.type.lanes // 2))


@unrolled
def high(x: Value) -> Value:
    return shuffle(x, range(x.type.lanes // 2, x.type.lanes))


@unrolled
def join(x: Value, y: Value) -> Value:
    """`x` in the lower lanes, `y` in the upper."""
    return shuffle(x, range(2 * x.type.lanes), y)


def pack(parts: Sequence[Value]) -> Value:
    """A vector of scalars of one type, in order (unrolled functions only)."""
    kind = VecType(parts[0].type, len(parts))
    vector = ir.Constant(llvm_type(kind), ir.Undefined)
    for lane_number, part in enumerate(parts):
        vector = builder().insert_element(vector, part.ir, _I32(lane_number))
    return Value(kind, vector)


def bit_masks(bits: Value, numbers: Sequence[Sequence[int]]) -> list[Value]:
    """Of eight or fewer u16 numbers, the bits of those named, an even number of them, as masks for `select`, the lowest bit of the first
    number first (unrolled functions only)."""
    if "avx512bw" in features():
        chosen = [shuffle(bits, of) for of in numbers]
        return [
            Value(VecType(types.boolean, 16 * x.type.lanes), builder().bitcast(x.ir, llvm_type(VecType(types.boolean, 16 * x.type.lanes))))
            for x in chosen
        ]
    # both halves of a register hold all of them, so that every byte has its bits at hand
    twice = opaque(repeat(reinterpret(u8x16, shuffle(bits, [i % bits.type.lanes for i in range(8)])), 2))
    masks = []
    for of in numbers:
        byte_of = [2 * number + lane // 8 for number in of for lane in range(16)]
        each_byte = _joined(
            [shuffle(twice, [byte_of[i + lane] + lane // 16 * 16 for lane in range(32)]) for i in range(0, len(byte_of), 32)]
        )
        bit = constant(each_byte.type, [1 << lane % 8 for lane in range(len(byte_of))])
        masks.append((each_byte & bit) == bit)
    return masks


def opaque(x: Value) -> Value:
    """The same value, computed as written: LLVM moves nothing past this point (unrolled functions only)."""
    return _through_assembly(x, "=v,0", side_effect=False)


def pinned(x: Value) -> Value:
    """The same value, computed before anything that is written after it is loaded or stored: LLVM would first do every load that is
    possible and then be out of registers (unrolled functions only)."""
    register = _register_bits()
    lanes = register // x.type.element.bitwidth
    if register and x.type.lanes > lanes:
        return _joined([pinned(part) for part in _split(x, lanes)])
    return _through_assembly(x, "=v,0,~{memory}", side_effect=True)


def _register_bits() -> int:
    """Of the vector registers that LLVM passes to assembly on x86; elsewhere 0."""
    return next((bits for needed, bits in (("avx512f", 512), ("avx2", 256), ("sse2", 128)) if needed in features()), 0)


def _through_assembly(x: Value, constraints: str, *, side_effect: bool) -> Value:
    """Through an empty piece of assembly; where x does not fit a register, x as it is."""
    widest = _register_bits()
    if x.type.lanes * x.type.element.bitwidth > widest:
        return x
    return Value(x.type, builder().asm(ir.FunctionType(x.ir.type, [x.ir.type]), "", constraints, [x.ir], side_effect=side_effect))


def repeat(x: Value, times: int) -> Value:
    """All lanes of `x`, `times` over (unrolled functions only)."""
    return shuffle(x, list(range(x.type.lanes)) * times)


def table16(table: Value, index: Value) -> Value:
    """`table[index]` for a table of 16 bytes and indices 0..15 in any number of byte lanes (unrolled functions only)."""
    lanes = index.type.lanes
    kind = VecType(table.type.element, lanes)
    have = features()
    for needed, width, name in (("avx512bw", 64, "avx512.pshuf.b.512"), ("avx2", 32, "avx2.pshuf.b"), ("ssse3", 16, "ssse3.pshuf.b.128")):
        if needed in have and lanes >= width and lanes % width == 0:
            tables = repeat(table, width // 16)
            parts = [
                Value(VecType(kind.element, width), _call(f"llvm.x86.{name}", tables.ir.type, [tables.ir, part.ir]))
                for part in _split(index, width)
            ]
            return _joined(parts)
    result = constant(kind, 0)
    for entry in range(16):
        result = select(index == entry, splat(kind, table[entry]), result)
    return result


def bytes_at(x: Value, shifts: Sequence[int]) -> Value:
    """Of every u64 lane, eight bytes: the eight bits from each place on, none beyond the lane (unrolled functions only)."""
    lanes = 8 * x.type.lanes
    kind = VecType(u8, lanes)
    if "avx512vbmi" in features() and "avx512vl" in features() and lanes in (32, 64):
        places = constant(kind, list(shifts) * x.type.lanes)
        return Value(kind, _call(f"llvm.x86.avx512.pmultishift.qb.{8 * lanes}", llvm_type(kind), [places.ir, reinterpret(kind, x).ir]))
    masks: dict[int, int] = {}
    for i, shift in enumerate(shifts):
        masks[shift - 8 * i] = masks.get(shift - 8 * i, 0) | 255 << 8 * i
    parts = [((x >> right) if right >= 0 else (x << -right)) & mask for right, mask in masks.items()]
    return reinterpret(kind, functools.reduce(operator.or_, parts))


def with_even_bits(x: Value) -> Value:
    """u8 lanes: the lower seven bits, and the highest set where that makes their number even (unrolled functions only)."""
    if "gfni" in features() and x.type.lanes in (16, 32, 64):
        rows = constant(x.type, [127, 64, 32, 16, 8, 4, 2, 1] * (x.type.lanes // 8))  # the bits whose sum is bit 7, bit 6, ...
        nothing = ir.Constant(ir.IntType(8), 0)
        return Value(x.type, _call(f"llvm.x86.vgf2p8affineqb.{8 * x.type.lanes}", x.ir.type, [x.ir, rows.ir, nothing]))
    lower = x & 127
    return lower | (count_bits(lower) << 7)


def _split(x: Value, lanes: int) -> list[Value]:
    return [x] if x.type.lanes == lanes else [shuffle(x, range(i, i + lanes)) for i in range(0, x.type.lanes, lanes)]


def _joined(parts: list[Value]) -> Value:
    while len(parts) > 1:
        parts = [join(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
    return parts[0]


# ---- arithmetic


@unrolled
def fma(x: Value, y: Any, z: Any) -> Value:
    """x*y + z, rounded once where the CPU can; else twice."""
    kind = common_type(x, y, z)
    x, y, z = (coerce(v, kind) for v in (x, y, z))
    if "fma" in features() or "neon" in features():
        return _overloaded("fma", kind, x, y, z)
    return x * y + z


@unrolled
def select(mask: Value, x: Any, y: Any) -> Value:
    """x where the mask (a comparison's result) is true, else y."""
    kind = common_type(x, y)
    return Value(kind, builder().select(mask.ir, coerce(x, kind).ir, coerce(y, kind).ir))


@unrolled
def minimum(x: Value, y: Any) -> Value:
    return select(x < y, x, y)


@unrolled
def maximum(x: Value, y: Any) -> Value:
    return select(x > y, x, y)


@unrolled
def absolute(x: Value) -> Value:
    if isinstance(element_of(x.type), types.Float):
        return _overloaded("fabs", x.type, x)
    return maximum(x, -x)


@unrolled
def count_bits(x: Value) -> Value:
    """How many bits of each lane are set."""
    return _overloaded("ctpop", x.type, x)


@unrolled
def sqrt(x: Value) -> Value:
    return _overloaded("sqrt", x.type, x)


@unrolled
def nearest(x: Value) -> Value:
    """f32 rounded to the nearest whole number, ties to even, for |x| < 2**22: adding 1.5 * 2**23 leaves no room for a fraction."""
    magic = constant(x.type, 12582912.0)
    return (x + magic) - magic


def _halves(x: Value, combine: Any) -> Value:
    while x.type.lanes > 1:
        half = x.type.lanes // 2
        x = combine(shuffle(x, range(half)), shuffle(x, range(half, 2 * half)))
    return x[0]


@unrolled
def hsum(x: Value) -> Value:
    """Sum of all lanes. Order: lower half plus upper half, lane by lane, until one is left."""
    return _halves(x, lambda a, b: a + b)


@unrolled
def hmax(x: Value) -> Value:
    return _halves(x, maximum)


@unrolled
def first_lane(mask: Value) -> Value:
    """The number (int64) of the first true lane of a comparison's result, or the number of lanes."""
    b = builder()
    bits = b.bitcast(mask.ir, ir.IntType(mask.type.lanes))
    return convert(i64, Value(u32, b.zext(_call(f"llvm.cttz.i{mask.type.lanes}", bits.type, [bits, ir.Constant(ir.IntType(1), 0)]), _I32)))


@unrolled
def exp(x: Value) -> Value:
    """e**x for f32, scalar or vector with the same bits: error below 1.3 ulp, inf above 88.73, 0 below -103.98, NaN stays."""
    kind = x.type
    # NaN passes both comparisons unchanged because select takes the second operand then
    bounded = select(x > 89.0, constant(kind, 89.0), select(x < -105.0, constant(kind, -105.0), x))
    n = nearest(bounded * 1.4426950408889634)
    r = fma(n, -0.693359375, bounded)
    r = fma(n, 2.12194440e-4, r)
    p = constant(kind, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, coefficient)
    p = fma(p, r * r, r + 1.0)
    # 2**n in two factors, so that results below the smallest normal number come out rounded and 2**128 stays representable
    whole = convert(with_element(kind, i32), n)
    first = whole >> 1
    return (p * _power_of_two(first)) * _power_of_two(whole - first)


@unrolled
def softplus(x: Value) -> Value:
    """log(1 + e**x) for f32, scalar or vector with the same bits: error below 2 ulp, x itself where it is large, NaN stays."""
    kind = x.type
    u = exp(-absolute(x))  # never above 1
    # log(1 + u) = log2 + log(1 + z) with 1 + u = 2 (1 + z), where that brings it nearer to 1
    halved = u > 0.41421356
    z = select(halved, (u - 1.0) * 0.5, u)
    p = constant(kind, 7.0376836292e-2)
    for coefficient in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
                        -2.4999993993e-1, 3.3333331174e-1):  # fmt: skip
        p = fma(p, z, coefficient)
    square = z * z
    rest = fma(square, -0.5, p * (square * z))
    log = select(halved, (rest - 2.12194440e-4 + z) + 0.693359375, rest + z)
    return maximum(x, constant(kind, 0.0)) + log


def _power_of_two(n: Value) -> Value:
    return reinterpret(with_element(n.type, f32), (n + 127) << 23)


# ---- integer dots. All lowerings give the same integers; what each one may assume is said in its first line.


@unrolled
def dot_u8(total: Value, u: Value, s: Value) -> Value:
    """total[i] + sum of u[4i..4i+3] * s[4i..4i+3]; u (u8) holds 0..127 (0..255 after `unsigned_form`), s i8, total i32."""
    if lane() == "vnni":
        return _dpbusd(total, u, s)
    if lane() == "avx2":
        return dot_i16(total, pair_sums(u, s), constant(VecType(i16, u.type.lanes // 2), 1))
    return _dot_generic(total, u, s)


@unrolled
def dot_i8(total: Value, x: Value, y: Value) -> Value:
    """total[i] + sum of x[4i..4i+3] * y[4i..4i+3], both i8 in -127..127."""
    if lane() == "vnni":
        # the instruction wants one unsigned side: (x + 128) . y - 128 . y; it adds in 32 bits, so nothing saturates
        wide = VecType(u8, x.type.lanes)
        shifted = reinterpret(wide, x) ^ 0x80
        return _dpbusd(total, shifted, y) - _dpbusd(constant(total.type, 0), constant(wide, 128), y)
    if lane() == "avx2":
        return dot_i16(total, pair_sums(x, y), constant(VecType(i16, x.type.lanes // 2), 1))
    return _dot_generic(total, x, y)


def signed_offset() -> int:
    """What `unsigned_form` adds: 128 where the dot's unsigned side may use all its range, else 0."""
    return 128 if lane() == "vnni" else 0


def unsigned_form(x: Value) -> Value:
    """Signed bytes in the form `dots` multiplies fastest here: u8 holding x + 128, or x itself (see `signed_offset`)."""
    return reinterpret(VecType(u8, x.type.lanes), x) ^ 0x80 if signed_offset() else x


def dots_at_once(largest: int) -> int:
    """How many pairs `dots` should be given together, for values of at most `largest`."""
    return max(1, 32767 // (2 * 127 * largest)) if lane() == "avx2" else 1


def dots(total: Value, pairs: Sequence[tuple[Value, Value]], largest: int) -> Value:
    """total[i] + all x[4i..4i+3] * s[4i..4i+3]; no x is above `largest`, nor below 0 if it is u8 (unrolled functions only)."""
    if lane() != "avx2" or pairs[0][0].type.element == i8:
        for x, s in pairs:
            total = dot_i8(total, x, s) if x.type.element == i8 else dot_u8(total, x, s)
        return total
    # pairs of products add up in 16 bits for as long as they must fit
    fits = dots_at_once(largest)
    ones = constant(VecType(i16, total.type.lanes * 2), 1)
    for start in range(0, len(pairs), fits):
        sums = [pair_sums(x, s) for x, s in pairs[start : start + fits]]
        total = dot_i16(total, functools.reduce(operator.add, sums), ones)
    return total


@unrolled
def pair_sums(x: Value, s: Value) -> Value:
    """x[2i] * s[2i] + x[2i+1] * s[2i+1] as i16; s is i8, x u8 in 0..128 or i8 in -127..127, so that a pair always fits."""
    lanes = x.type.lanes
    lowerings = (("avx512bw", 64, "avx512.pmaddubs.w.512"), ("avx2", 32, "avx2.pmadd.ub.sw"))
    width, name = next(((width, name) for needed, width, name in lowerings if needed in features() and lanes % width == 0), (0, ""))
    if not width:
        products = convert(VecType(i16, lanes), x) * convert(VecType(i16, lanes), s)
        return shuffle(products, range(0, lanes, 2)) + shuffle(products, range(1, lanes, 2))
    if x.type.element == i8:
        x, s = reinterpret(VecType(u8, lanes), absolute(x)), _with_sign_of(x, s)
    kind = VecType(i16, width // 2)
    pairs = zip(_split(x, width), _split(s, width), strict=True)
    return _joined([Value(kind, _call(f"llvm.x86.{name}", llvm_type(kind), [a.ir, b.ir])) for a, b in pairs])


@unrolled
def dot_i16(total: Value, x: Value, y: Value) -> Value:
    """total[i] + x[2i] * y[2i] + x[2i+1] * y[2i+1], all exact in i32 (both factors never -32768 at once)."""
    lanes = x.type.lanes
    vnni = lane() == "vnni"
    for needed, width, bits, name in (("avx512bw", 32, 512, "avx512.pmaddw.d.512"), ("avx2", 16, 256, "avx2.pmadd.wd")):
        if needed in features() and lanes % width == 0:
            kind = VecType(i32, width // 2)
            parts = []
            for t, a, b in zip(_split(total, width // 2), _split(x, width), _split(y, width), strict=True):
                if vnni and _VNNI_512 in features():
                    parts.append(Value(kind, _call(f"llvm.x86.avx512.vpdpwssd.{bits}", llvm_type(kind), [t.ir, a.ir, b.ir])))
                else:
                    parts.append(t + Value(kind, _call(f"llvm.x86.{name}", llvm_type(kind), [a.ir, b.ir])))
            return _joined(parts)
    products = convert(VecType(i32, lanes), x) * convert(VecType(i32, lanes), y)
    return total + shuffle(products, range(0, lanes, 2)) + shuffle(products, range(1, lanes, 2))


def multiplies_bfloats() -> bool:
    """Whether there is `dot_bfloat`."""
    return "avx512bf16" in features()


@unrolled
def dot_bfloat(total: Value, x: Value, y: Value) -> Value:
    """total[i] + x[2i] * y[2i] + x[2i+1] * y[2i+1] for 32 bf16 bit patterns (u16); how the two additions round is up to the CPU."""
    bfloats = ir.VectorType(_BFLOAT, 32)
    operands = [total.ir, *(builder().bitcast(v.ir, bfloats) for v in (x, y))]
    return Value(f32x16, _call("llvm.x86.avx512bf16.dpbf16ps.512", total.ir.type, operands))


def _with_sign_of(x: Value, y: Value) -> Value:
    """y, -y or 0 as x is positive, negative or 0 (AVX2)."""
    kind = VecType(i8, 32)
    halves = zip(_split(x, 32), _split(y, 32), strict=True)
    return _joined([Value(kind, _call("llvm.x86.avx2.psign.b", llvm_type(kind), [b.ir, a.ir])) for a, b in halves])


def _dpbusd(total: Value, u: Value, s: Value) -> Value:
    width = 64 if _VNNI_512 in features() and u.type.lanes % 64 == 0 else 32
    kind = VecType(i32, width // 4)
    quads = zip(_split(total, width // 4), _split(u, width), _split(s, width), strict=True)
    name = f"llvm.x86.avx512.vpdpbusd.{width * 8}"
    return _joined([Value(kind, _call(name, llvm_type(kind), [t.ir, a.ir, b.ir])) for t, a, b in quads])


def _dot_generic(total: Value, x: Value, y: Value) -> Value:
    lanes = x.type.lanes
    if "dotprod" in features():
        # aarch64: one sdot for each 128 bits; u never passes 127, so both sides may be signed. Asked for by name: of a sum of products that
        # LLVM knows to be unsigned on one side it makes something else, as the instruction with mixed signs is a later extension.
        kind = VecType(i32, 4)
        signed = [reinterpret(VecType(i8, lanes), v) for v in (x, y)]
        quads = zip(_split(total, 4), *(_split(v, 16) for v in signed), strict=True)
        return _joined([Value(kind, _call("llvm.aarch64.neon.sdot.v4i32.v16i8", llvm_type(kind), [v.ir for v in quad])) for quad in quads])
    wide = VecType(i32, lanes)
    products = convert(wide, x) * convert(wide, y)
    quarters = [shuffle(products, range(i, lanes, 4)) for i in range(4)]
    return total + ((quarters[0] + quarters[1]) + (quarters[2] + quarters[3]))
