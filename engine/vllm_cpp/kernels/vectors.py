"""Vector types for numba and the values that build them.

Owns `VecType` (an LLVM vector seen as a numba type), `Value` (a vector or scalar while it is being built, with Python's operators) and
`unrolled`, which makes one Python function usable both inside compiled kernels and inside other unrolled functions. An unrolled
function runs once, in Python, while a kernel is compiled: its loops and ifs leave straight-line code, and numba infers no types
inside it (that, not LLVM, is what compiling costs). Must not know any operation by name (`simd.py`), nor jit options (`jit.py`).
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, config, types
from numba.core.datamodel import models
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, register_model

_building = threading.local()


def features() -> frozenset[str]:
    """Names of the instruction sets that numba compiles for here (`avx2`, `f16c`, `dotprod`, ...)."""
    if config.CPU_FEATURES is not None:
        flags = config.CPU_FEATURES.split(",")
        return frozenset(flag[1:] for flag in flags if flag.startswith("+"))
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


class VecType(types.Type):
    """`lanes` values of one numba scalar type in a vector register (or several: LLVM splits what the target has not)."""

    def __init__(self, element: types.Type, lanes: int):
        self.element = element
        self.lanes = lanes
        super().__init__(name=f"{element}x{lanes}")


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: VecType):
        super().__init__(dmm, fe_type, llvm_type(fe_type))


def llvm_type(kind: types.Type) -> ir.Type:
    if isinstance(kind, VecType):
        return ir.VectorType(llvm_type(kind.element), kind.lanes)
    if isinstance(kind, types.Integer):
        return ir.IntType(kind.bitwidth)
    if isinstance(kind, types.Boolean):
        return ir.IntType(1)
    return {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}[kind]


def element_of(kind: types.Type) -> types.Type:
    return kind.element if isinstance(kind, VecType) else kind


def with_element(kind: types.Type, element: types.Type) -> types.Type:
    """The same shape (scalar or number of lanes) of another element type."""
    return VecType(element, kind.lanes) if isinstance(kind, VecType) else element


def builder() -> ir.IRBuilder:
    """Where the unrolled function that runs now puts its instructions."""
    return _building.builder


@contextmanager
def _building_with(irbuilder: ir.IRBuilder):
    outer = getattr(_building, "builder", None)
    _building.builder = irbuilder
    try:
        yield
    finally:
        _building.builder = outer


class Value:
    """A typed LLVM value under construction. Numbers mixed in become constants; a scalar beside a vector is repeated in every lane."""

    __slots__ = ("ir", "type")

    def __init__(self, kind: types.Type, llvm_value: ir.Value):
        self.type = kind
        self.ir = llvm_value

    def __getitem__(self, lane: int | Value) -> Value:
        index = ir.Constant(ir.IntType(32), lane) if isinstance(lane, int) else lane.ir
        return Value(self.type.element, builder().extract_element(self.ir, index))

    def __neg__(self) -> Value:
        if isinstance(element_of(self.type), types.Float):
            return Value(self.type, builder().fneg(self.ir))
        return constant(self.type, 0) - self

    def __invert__(self) -> Value:
        return self ^ constant(self.type, -1)


def constant(kind: types.Type, number: Any) -> Value:
    """A constant: one number for all lanes or a sequence with one each."""
    element = element_of(kind)
    cast: Callable[[Any], Any] = float if isinstance(element, types.Float) else int
    if not isinstance(kind, VecType):
        return Value(kind, ir.Constant(llvm_type(kind), cast(number)))
    numbers = list(number) if isinstance(number, Iterable) else [number] * kind.lanes
    if len(numbers) != kind.lanes:
        raise ValueError(f"{kind} has {kind.lanes} lanes, {len(numbers)} numbers given")
    return Value(kind, ir.Constant(llvm_type(kind), [cast(x) for x in numbers]))


def coerce(x: Any, kind: types.Type) -> Value:
    """`x` as a value of `kind`: the same type, a Python number, or a scalar to be widened, converted and repeated."""
    if not isinstance(x, Value):
        return constant(kind, x)
    if x.type == kind:
        return x
    if isinstance(x.type, VecType):
        raise TypeError(f"a {x.type} where a {kind} is needed: convert() or reinterpret() it")
    return splat(scalar_cast(x, element_of(kind)), kind)


def splat(x: Value, kind: types.Type) -> Value:
    if not isinstance(kind, VecType):
        return x
    b = builder()
    vector = llvm_type(kind)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), x.ir, ir.Constant(ir.IntType(32), 0))
    return Value(kind, b.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), kind.lanes), [0] * kind.lanes)))


def scalar_cast(x: Value, to: types.Type) -> Value:
    return x if x.type == to else Value(to, cast_llvm(x.ir, x.type, to))


def cast_llvm(value: ir.Value, source: types.Type, target: types.Type) -> ir.Value:
    """Number conversion, scalar or lane by lane: integers extend by the source's sign and wrap, floats to integers truncate."""
    b = builder()
    to = llvm_type(target)
    source, target = element_of(source), element_of(target)
    if isinstance(source, types.Float):
        if isinstance(target, types.Float):
            return b.fpext(value, to) if target.bitwidth > source.bitwidth else b.fptrunc(value, to) if source != target else value
        return b.fptosi(value, to) if target.signed else b.fptoui(value, to)
    signed = isinstance(source, types.Integer) and source.signed
    if isinstance(target, types.Float):
        return b.sitofp(value, to) if signed else b.uitofp(value, to)
    source_bits = source.bitwidth if isinstance(source, types.Integer) else 1
    if target.bitwidth == source_bits:
        return value
    if target.bitwidth < source_bits:
        return b.trunc(value, to)
    return b.sext(value, to) if signed else b.zext(value, to)


def common_type(*operands: Any) -> types.Type:
    """The type an operation on these happens in: a vector's before any scalar's, a float before integers, then the widest."""
    kinds = [v.type for v in operands if isinstance(v, Value)]
    for kind in kinds:
        if isinstance(kind, VecType):
            return kind
    floats = [kind for kind in kinds if isinstance(kind, types.Float)]
    return max(floats or kinds, key=lambda kind: kind.bitwidth)


def _binary(name: str, on_float: str, on_signed: str, on_unsigned: str) -> Callable[[Any, Any], Value]:
    def apply(x: Any, y: Any) -> Value:
        kind = common_type(x, y)
        element = element_of(kind)
        method = on_float if isinstance(element, types.Float) else on_signed if getattr(element, "signed", False) else on_unsigned
        if not method:
            raise TypeError(f"operator {name} does not exist for {kind}")
        return Value(kind, getattr(builder(), method)(coerce(x, kind).ir, coerce(y, kind).ir))

    return apply


def _compare(name: str) -> Callable[[Any, Any], Value]:
    def apply(x: Any, y: Any) -> Value:
        kind = common_type(x, y)
        element = element_of(kind)
        left, right = coerce(x, kind).ir, coerce(y, kind).ir
        b = builder()
        if isinstance(element, types.Float):
            # Python's meaning for NaN: only != is true
            result = b.fcmp_unordered(name, left, right) if name == "!=" else b.fcmp_ordered(name, left, right)
        else:
            result = b.icmp_signed(name, left, right) if element.signed else b.icmp_unsigned(name, left, right)
        return Value(with_element(kind, types.boolean), result)

    return apply


_BINARY = {
    "add": _binary("+", "fadd", "add", "add"),
    "sub": _binary("-", "fsub", "sub", "sub"),
    "mul": _binary("*", "fmul", "mul", "mul"),
    "truediv": _binary("/", "fdiv", "", ""),
    "and_": _binary("&", "", "and_", "and_"),
    "or_": _binary("|", "", "or_", "or_"),
    "xor": _binary("^", "", "xor", "xor"),
    "lshift": _binary("<<", "", "shl", "shl"),
    "rshift": _binary(">>", "", "ashr", "lshr"),
}
_COMPARE = {name: _compare(sign) for name, sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!="))}


def _install_operators() -> None:
    for name, function in (_BINARY | _COMPARE).items():
        dunder = name.rstrip("_")
        setattr(Value, f"__{dunder}__", function)
        if name in _BINARY:
            setattr(Value, f"__r{dunder}__", lambda self, other, f=function: f(other, self))
        _register_operator(getattr(operator, name), function, binary=True)
        if name in _BINARY:
            _register_operator(getattr(operator, "i" + dunder), function, binary=True)
    Value.__hash__ = None
    _register_operator(operator.neg, Value.__neg__, binary=False)
    _register_operator(operator.invert, Value.__invert__, binary=False)
    _register_operator(operator.getitem, Value.__getitem__, binary=True)


def _register_operator(python_operator: Any, function: Callable[..., Value], *, binary: bool) -> None:
    class VectorOperator(AbstractTemplate):
        key = python_operator

        def generic(self, args: tuple, _keywords: dict) -> Any:
            if not any(isinstance(a, VecType) for a in args):
                return None
            return signature(_result_type(function, args), *args)

    infer_global(python_operator)(VectorOperator)

    def lower(context: Any, irbuilder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return _run(function, context, irbuilder, sig, args)

    shapes = [(VecType, VecType), (VecType, types.Number), (types.Number, VecType)] if binary else [(VecType,)]
    for shape in shapes:
        lower_builtin(python_operator, *shape)(lower)


def _argument(kind: types.Type, llvm_value: ir.Value | None, irbuilder: ir.IRBuilder) -> Any:
    """What an unrolled function receives for a compiled argument: a Value, a tuple of them, or a type that was passed by name."""
    if isinstance(kind, types.Literal):
        kind = types.unliteral(kind)
    if isinstance(kind, (types.TypeRef, types.NumberClass)):
        return kind.instance_type
    if isinstance(kind, types.BaseTuple):
        return tuple(_argument(k, v, irbuilder) for k, v in zip(kind, cgutils.unpack_tuple(irbuilder, llvm_value), strict=True))
    if isinstance(kind, types.NoneType):
        return None
    return Value(kind, llvm_value)


def _type_of(result: Any) -> types.Type:
    if result is None:
        return types.none
    if isinstance(result, (tuple, list)):
        return types.BaseTuple.from_types([_type_of(r) for r in result])
    return result.type


def _result_type(function: Callable, kinds: tuple) -> types.Type:
    """Run the function into a module that is thrown away: what it returns is its type."""
    abi_kinds = [types.unliteral(k) for k in kinds]
    b = ir.IRBuilder(ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), []), "probe").append_basic_block())
    values = [ir.Constant(_probe_type(k), ir.Undefined) for k in abi_kinds]
    with _building_with(b):
        return _type_of(function(*(_argument(k, v, b) for k, v in zip(abi_kinds, values, strict=True))))


def _probe_type(kind: types.Type) -> ir.Type:
    if isinstance(kind, types.BaseTuple):
        parts = [_probe_type(k) for k in kind]
        return ir.ArrayType(parts[0], len(parts)) if isinstance(kind, types.UniTuple) else ir.LiteralStructType(parts)
    if isinstance(kind, (types.TypeRef, types.NumberClass, types.NoneType)):
        return ir.IntType(8)
    return llvm_type(kind)


def _run(function: Callable, context: Any, irbuilder: ir.IRBuilder, sig: Any, args: Any) -> Any:
    with _building_with(irbuilder):
        result = function(*(_argument(k, v, irbuilder) for k, v in zip(sig.args, args, strict=True)))
        return _returned(context, irbuilder, sig.return_type, result)


def _returned(context: Any, irbuilder: ir.IRBuilder, kind: types.Type, result: Any) -> Any:
    if result is None:
        return context.get_dummy_value()
    if isinstance(result, (tuple, list)):
        parts = [_returned(context, irbuilder, k, r) for k, r in zip(kind, result, strict=True)]
        return context.make_tuple(irbuilder, kind, parts)
    return result.ir


def unrolled(function: Callable) -> Callable:
    """Decorate a function over Values so that compiled kernels can call it too; types are passed by name, constants as numbers."""
    if inspect.ismethod(function):  # numba takes plain functions only
        method, owner = function.__func__, function.__self__
        function = functools.wraps(method)(lambda *args: method(owner, *args))
    known: dict[tuple, types.Type] = {}

    class UnrolledFunction(AbstractTemplate):
        key = function

        def generic(self, args: tuple, _keywords: dict) -> Any:
            if args not in known:
                known[args] = _result_type(function, args)
            return signature(known[args], *args)

    infer_global(function, types.Function(UnrolledFunction))

    @lower_builtin(function, types.VarArg(types.Any))
    def lower(context: Any, irbuilder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return _run(function, context, irbuilder, sig, args)

    return function


_install_operators()
