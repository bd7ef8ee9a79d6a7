"""Where chat templates run: a template is a program out of a downloaded file.

Owns the sandbox. jinja2's own keeps a template away from Python's insides; here it is metered as well: loop turns, slices, concatenations
and comparisons go through the sandbox, and operations that multiply (`*`, replace, join, padding, formatting) are measured before they
run. Must not know messages or tokens. What templates may use is what transformers offers them: loop controls, tojson, raise_exception,
strftime_now, a `generation` tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from vllm_cpp.tokenizer.template_meter import MAX_WIDTH, BudgetError, Meter

# Filters that multiply their input and that chat templates have no use for. A template that names one is refused when it is compiled.
_NO_FILTERS = ("batch", "center", "filesizeformat", "pprint", "random", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
# Filters and tests that spell their arguments out, or compare them.
_WALKING_FILTERS = {
    "capitalize", "dictsort", "e", "escape", "forceescape", "format", "groupby", "indent", "lower", "max", "min", "replace", "safe", "sort",
    "string", "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
}  # fmt: skip
_WALKING_TESTS = {
    "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le", "in",
}  # fmt: skip
_NO_METHODS = {"encode", "maketrans", "to_bytes", "translate"}
_WIDTH_METHODS = {"center", "expandtabs", "ljust", "rjust", "zfill"}
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\d{5}|\*)")
_WIDE_BRACES = re.compile(r":[^{}]*(\d{5}|\{)")
_WIDE_DATE = re.compile(r"%[^%a-zA-Z]*\d{3}")


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metered(NodeTransformer):
    """Sends what jinja2 compiles to plain Python through the sandbox, where it can be metered."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (named by the node, like those below)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn"), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("turn"), node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        # Most comparisons have a constant on one side, and cost nothing.
        if not isinstance(node.expr, nodes.Const) and not all(isinstance(operand.expr, nodes.Const) for operand in node.ops):
            node.expr = _call("walkable", node.expr)
            for operand in node.ops:
                operand.expr = _call("walkable", operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _call("walkable", node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        part = node.arg
        if not isinstance(part, nodes.Slice):
            return node
        return _call("cut", node.node, *(end or nodes.Const(None) for end in (part.start, part.stop, part.step)))


def _call(method: str, *args: nodes.Expr) -> nodes.Call:
    """A call of one of the sandbox's methods. Like every call in a template it is made by, and paid for in, Sandbox.call."""
    return nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that compiles and runs templates. Any thread may use it."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self._meter = Meter()
        self.walkable = self._meter.walkable
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._meter.shown)
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": self._raise_exception, "strftime_now": _strftime_now}
        self.filters |= {"tojson": _tojson, "join": self._join, "sum": self._sum}
        for name in _NO_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = self._metered_filter(name, function)
        for name in _WALKING_TESTS:
            self.tests[name] = self._metered_test(self.tests[name])

    def compiled(self, source: str, label: str) -> Template:
        """A template whose code carries `label` as its file name."""
        self._meter.start()
        return Template.from_code(self, self.compile(source, filename=label), self.make_globals(None))

    def run(self, template: Template, variables: dict[str, Any]) -> str:
        self._meter.start()
        return self.concat(template.root_render_func(template.new_context(variables)))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Metered().visit(tree)
        return tree.set_environment(self)

    # -- what compiled templates call
    def turn(self) -> bool:
        """A turn of a loop; the call is what counts."""
        return True

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return value[start:stop:step]

    def joined(self, *parts: Any) -> str:
        return self.concat(self._meter.shown(part) for part in parts)

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]  # jinja2 has "".join here
        return self._meter.join(parts)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.walkable(argument))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (so that no keyword's name is taken)
        __self._meter.spend(1)
        __self._check_method(__obj, args, kwargs)
        return __self._meter.result(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                self._meter.text(len(left) + len(right))
            elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                self._meter.items(len(left) + len(right))
        elif operator == "*":
            self._check_repeat(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._meter.integer(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            self._check_format(_WIDE_PERCENT, left, (right,))
        return super().call_binop(context, operator, left, right)

    # -- operations that multiply
    def _check_repeat(self, left: Any, right: Any) -> None:
        for times, value in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, str):
                self._meter.text(len(value) * max(times, 0))
            elif isinstance(times, int) and isinstance(value, (list, tuple)):
                self._meter.items(len(value) * max(times, 0))
        if isinstance(left, int) and isinstance(right, int):
            self._meter.integer(left.bit_length() + right.bit_length())

    def _check_replace(self, text: Any, old: Any, new: Any, *_: Any) -> None:
        text, old, new = self._meter.shown(text), self._meter.shown(old), self._meter.shown(new)
        self._meter.text(len(text) + text.count(old) * len(new))

    def _check_format(self, wide: re.Pattern[str], form: str, values: Iterable[Any]) -> None:
        if wide.search(form):
            raise BudgetError(f"it formats with a width over {MAX_WIDTH}")
        # A form may show a value once for each place that it has.
        places = max(form.count("%"), form.count("{"), 1)
        self._meter.text(len(form) + places * sum(len(self._meter.shown(value)) for value in values))

    def _check_method(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in args:
            if isinstance(value, tuple):
                self.walkable(value)  # it may be a key to look up
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if name in ("format", "format_map") and hasattr(function, "__wrapped__"):  # jinja2's stand-in for the methods of str
            self._check_format(_WIDE_BRACES, function.__wrapped__.__self__, (*args, *kwargs.values()))
        if not isinstance(owner, (str, int, float, bytes)):
            return
        if name in _NO_METHODS:
            raise SecurityError(f"{type(owner).__name__}.{name} is not for templates")
        if name in _WIDTH_METHODS:
            self._meter.widths(*args, *kwargs.values())
        elif name == "replace" and len(args) >= 2:
            self._check_replace(owner, *args)
        elif name == "join" and args:
            parts = [part for part in args[0] if isinstance(part, str)]
            self._meter.text(sum(map(len, parts)) + len(owner) * len(parts))

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or context comes before the value
        meter = self._meter

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            meter.spend(1)
            values = (*args[first:], *kwargs.values())
            if name in _WALKING_FILTERS:
                meter.walkable(values)
            if name == "replace" and len(values) >= 3:
                self._check_replace(*values)
            elif name == "format":
                self._check_format(_WIDE_PERCENT, meter.shown(values[0]), values[1:])
            elif name == "indent":
                meter.widths(*values[1:])
                self._check_replace(values[0], "\n", "\n" + " " * max((v for v in values[1:] if isinstance(v, int)), default=4))
            elif name == "int" and isinstance(values[0], str):
                meter.integer(4 * len(values[0]))
            elif name == "round":
                meter.widths(*(10 * value for value in values[1:] if isinstance(value, int)))
            return meter.result(function(*args, **kwargs))

        return metered

    def _metered_test(self, function: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(function)
        def metered(*values: Any) -> bool:
            self.walkable(values)
            return function(*values)

        return metered

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        pick = make_attrgetter(self, attribute) if attribute is not None else None
        shown, spend = self._meter.shown, self._meter.spend

        def parts() -> Iterator[str]:
            for number, item in enumerate(value):
                spend(1)
                if number:
                    yield shown(d)
                yield shown(pick(item) if pick else item)

        return self.concat(parts())

    def _sum(self, value: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
        pick = make_attrgetter(self, attribute) if attribute is not None else None
        total = start
        for item in value:
            self._meter.spend(1)
            number = pick(item) if pick else item
            if not isinstance(number, (int, float)) or not isinstance(total, (int, float)):
                raise TemplateError("sum is for numbers")
            total += number
        return total

    def _raise_exception(self, message: Any) -> None:
        raise TemplateError(self._meter.shown(message))


def _strftime_now(form: str) -> str:
    if len(form) > 256 or _WIDE_DATE.search(form):
        raise BudgetError("strftime_now takes a short format without wide fields")
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as transformers writes it: jinja2's own filter escapes for HTML."""
    widths = [len(part) for part in separators or ()] + ([len(indent) if isinstance(indent, str) else indent] if indent else [])
    if any(width > 64 for width in widths):
        raise BudgetError("tojson takes separators and indentation of up to 64 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
