"""Hostile templates: no way to Python's insides, no unbounded time, no unbounded memory.

Each of these would run for minutes or take gigabytes if its bound were missing. They run under small limits, so that reaching one is quick.
"""

from __future__ import annotations

import threading

import pytest

from vllm_cpp.errors import InvalidArgumentError
from vllm_cpp.tokenizer import ChatTemplate, template_meter

MESSAGES = [{"role": "user", "content": "hi"}]
# A list that holds the one before it twice, sixty times over: tiny in memory, and 2^60 elements to walk.
TWICE = "{% set ns = namespace(l=('x',)) %}{% for i in range(60) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}"
LONG = "{% set a = 'x' * 1000 %}"


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_meter, "MAX_TEXT", 100_000)
    monkeypatch.setattr(template_meter, "MAX_ITEMS", 10_000)
    monkeypatch.setattr(template_meter, "MAX_WORK", 20_000)


def render(source: str) -> str:
    return ChatTemplate("m.gguf", {"default": source}, {}).render(MESSAGES)


def refusal(source: str) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        render(source)
    return str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ (1).to_bytes(4, 'big') }}",
        "{{ ('a' | attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}x{{ messages.pop() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ [''.__class__] | map(attribute='__base__') | first | attr('x') }}",
        "{{ joined.__func__ }}{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as p %}",
        "{% extends 'x' %}",
        "{{ lipsum(3) }}",
    ],
)
def test_there_is_no_way_out(source: str):
    assert "chat template 'default'" in refusal(source)


@pytest.mark.parametrize(
    "source", ["{{ ''|attr('__class__') }}", "{{ '{0.__class__}'.format('') }}", "{{ ['x']|map(attribute='__class__')|first }}"]
)
def test_private_attributes_are_nothing(source: str):
    assert render(source) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}",
        "{% for a in range(1000) %}{% for b in range(1000) if false %}{% endfor %}{% endfor %}",
        "{% for a in range(100) %}{{ range(10000) | map('string') | first }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set l = range(10000) | list %}{% for i in range(1000) %}{% set x = l[1:] %}{% endfor %}",
        "{% set l = range(10000) | list %}{% for i in range(1000) %}{% set x = l + [] %}{% endfor %}",
        "{% set a = 'x' * 90000 %}{% for i in range(1000) %}{% set x = a[1:] %}{% endfor %}",
        "{% set a = 'x' * 90000 %}{% for i in range(1000) %}{% set x = a ~ i %}{% endfor %}",
        "{% set a = 'x' * 90000 %}{% for i in range(1000) %}{% set x = a + 'y' %}{% endfor %}",
        "{% set a = 'x,' * 5000 %}{% for i in range(1000) %}{% set x = a.split(',') %}{% endfor %}",
        "{% set a = range(9000) | list %}{% set b = range(9000) | list %}{% for i in range(1000) %}{% if a == b %}{% endif %}{% endfor %}",
        "{% for i in range(1000) %}{% set x = range(9000) | sort(reverse=true) %}{% endfor %}",
        TWICE + "{{ ns.l }}",
        TWICE + "{{ ns.l | tojson }}",
        TWICE + "{{ ns.l ~ '' }}",
        TWICE + "{{ [ns.l] | join }}",
        TWICE + "{{ '%s' % (ns.l,) }}",
        TWICE + "{{ '{}'.format(ns.l) }}",
        TWICE + "{{ ns.l | urlencode }}",
        TWICE + "{{ {ns.l: 1} | length }}",
        TWICE + "{{ {}.get(ns.l) }}",
        TWICE + "{{ {}[ns.l] }}",
        TWICE + "{{ namespace(a=ns.l) }}",
        TWICE + "{{ raise_exception(ns.l) }}",
        TWICE + TWICE.replace("ns", "ms") + "{{ ns.l == ms.l }}",
        TWICE + TWICE.replace("ns", "ms") + "{{ [ns.l] | select('equalto', ms.l) | list }}",
        TWICE + TWICE.replace("ns", "ms") + "{{ [ns.l, ms.l] | unique | list }}",
    ],
)
def test_time_is_bounded(source: str):
    assert "it does too much work" in refusal(source)


def test_time_that_the_count_cannot_see_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_meter, "MAX_SECONDS", 0.0)
    assert "it does too much work" in refusal("{% for i in range(9) %}{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 12 }}",
        "{{ 10 ** 12 * 'x' }}",
        "{{ ([0] * 10 ** 12) | length }}",
        "{% set ns = namespace(s='xxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xxxx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xxxx') %}{% for i in range(60) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s=x %}{% endfor %}",
        LONG + "{{ a | replace('x', a) }}",
        LONG + "{{ a.replace('x', a) }}",
        LONG + "{{ a.join(range(1000) | map('string')) }}",
        LONG + "{{ range(1000) | join(a) }}",
        LONG + "{{ ([a] * 1000) | join }}",
        LONG + "{{ ([{'v': a}] * 1000) | join(attribute='v') }}",
        LONG + "{{ [a] * 1000 }}",
        LONG + "{{ ([a] * 1000) | string }}",
        LONG + "{{ ([a] * 1000) | tojson }}",
        LONG + "{{ '%s' % ([a] * 1000) }}",
        LONG + "{{ (('%(a)s' * 1000) % {'a': a}) | length }}",
        LONG + "{{ ('{0}' * 1000).format(a) }}",
        LONG + "{{ ('{a}' * 1000).format_map({'a': a}) }}",
        LONG + "{% for i in range(1000) %}{{ a }}{% endfor %}",
        "{{ range(100000) | list }}",
        "{{ ('x' * 90000) | list }}",
    ],
)
def test_memory_is_bounded(source: str):
    assert "it makes a " in refusal(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ '%1000000000d' % 1 }}", "formats with a width"),
        ("{{ '%*d' % (1000000000, 1) }}", "formats with a width"),
        ("{{ '%.1000000000f' | format(1.0) }}", "formats with a width"),
        ("{{ '{:>1000000000}'.format(1) }}", "formats with a width"),
        ("{{ '{:>{}}'.format(1, 1000000000) }}", "formats with a width"),
        ("{{ 'x'.ljust(10000000000) }}", "pads, indents or rounds"),
        ("{{ '1'.zfill(9999999999) }}", "pads, indents or rounds"),
        ("{{ '\t'.expandtabs(9999999999) }}", "pads, indents or rounds"),
        ("{{ 'a\nb' | indent(9999999999) }}", "pads, indents or rounds"),
        ("{{ 'a\nb' | indent('x' * 5000) }}", "pads, indents or rounds"),
        ("{{ 1.5 | round(999999999) }}", "pads, indents or rounds"),
        ("{{ [1] | tojson(indent=999999999) }}", "tojson takes"),
        ("{{ [1, 2] | tojson(separators=('x' * 100, ':')) }}", "tojson takes"),
        ("{{ strftime_now('%1000000000d') }}", "strftime_now takes"),
        ("{{ 2 ** 100000000 }}", "number of over 4096 bits"),
        ("{% set ns = namespace(x=2) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", "number of over 4096 bits"),
        ("{{ ('f' * 90000) | int(base=16) }}", "number of over 4096 bits"),
        ("{{ [[1]] | sum(start=[]) }}", "sum is for numbers"),
        ("{{ 'x'.encode('utf-32') }}", "str.encode is not for templates"),
    ],
)
def test_operations_that_multiply_are_measured_first(source: str, message: str):
    assert message in refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{{ " + "not " * 50_000 + "1 }}",
        "{{ 1" + "+1" * 50_000 + " }}",
        "{{ a" + ".b" * 50_000 + " }}",
        "{% if 1 %}" * 20_000,
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(5000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
    ],
)
def test_depth_is_bounded(source: str):
    assert "it is nested too deeply" in refusal(source)


def test_each_rendering_has_a_budget_of_its_own():
    template = ChatTemplate("m.gguf", {"default": "{% for i in range(5000) %}{% endfor %}ok"}, {})
    assert [template.render(MESSAGES) for _ in range(8)] == ["ok"] * 8
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(template.render(MESSAGES))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["ok"] * 4
