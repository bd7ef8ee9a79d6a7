"""Chat templates: where they come from, what they see, how they fail."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tiny_models.container import value
from vllm_cpp.errors import InvalidArgumentError
from vllm_cpp.gguf_file import open_model
from vllm_cpp.tokenizer import ChatTemplate
from vocabularies import CONTROL, Vocabularies, byte_pair_keys, file

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>ü</b> 'x'"}]


def render(source: str, messages: Any = MESSAGES, tools: Any = None, **variables: Any) -> str:
    return ChatTemplate("m.gguf", {"default": source}, {"bos_token": "<s>"}).render(messages, tools, **variables)


def test_the_template_of_a_file(vocabularies: Vocabularies):
    template = ChatTemplate.from_gguf(vocabularies.file("qwen2"))
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>ü</b> 'x'<|im_end|>\n"
    assert template.render(MESSAGES) == expected + "<|im_start|>assistant\n"
    assert template.render(MESSAGES, add_generation_prompt=False) == expected
    assert template.exists


def test_a_template_for_tools_is_taken_when_there_are_tools(vocabularies: Vocabularies):
    with open_model(vocabularies.file("command-r")) as model:
        template = ChatTemplate.from_gguf(model)
    tools = [{"name": "look", "description": "Looks.", "parameter_definitions": {}}]
    assert template.templates.keys() == {"default", "tool_use", "rag"}
    assert "def look() -> List[Dict]:" in template.render(MESSAGES, tools)
    assert template.render(MESSAGES).startswith("<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>")


def test_special_tokens_come_from_the_vocabulary(tmp_path: Path):
    source = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}"
    extra = [("<a>", CONTROL), ("<b>", CONTROL), ("<c>", CONTROL)]
    keys = byte_pair_keys(extra=extra, bos_token_id=256, unknown_token_id=257, padding_token_id=258, tokenizer__chat_template=source)
    assert ChatTemplate.from_gguf(file(tmp_path / "m.gguf", **keys)).render(MESSAGES) == "<a>||<b>|<c>"


def test_a_file_without_a_template_says_what_to_do(tmp_path: Path):
    template = ChatTemplate.from_gguf(file(tmp_path / "m.gguf", **byte_pair_keys()))
    assert not template.exists
    with pytest.raises(InvalidArgumentError, match=r"m.gguf has no chat template \(tokenizer.chat_template\).*tokenizer_config_path"):
        template.render(MESSAGES)


def test_a_named_template_that_is_not_there_is_no_template(tmp_path: Path):
    keys = byte_pair_keys(tokenizer__chat_templates=value(["rag"], "str"))
    assert not ChatTemplate.from_gguf(file(tmp_path / "m.gguf", **keys)).exists


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\n  {% set x = 1 %}\nx\n{% endif %}\ny", "x\ny"),  # trim_blocks, lstrip_blocks
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for i in range(4) if i % 2 %}{{ i }}{{ loop.last }}{% endfor %}", "1False3True"),
        ("{% generation %}a{% endgeneration %}{{ bos_token }}", "a<s>"),
        ("{{ {'b': 'ü<', 'a': [1, none]} | tojson }}", '{"b": "ü<", "a": [1, null]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ messages[1].content }}{{ messages[1]['content'] | upper }}", "Hi <b>ü</b> 'x'HI <B>Ü</B> 'X'"),
        ("{{ messages[1:] | length }}{{ messages[::-1][0].role }}", "1user"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ missing is defined }}", "TrueTrueTrueFalse"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "system, user"),
        ("{{ messages | join('/', attribute='role') }}", "system/user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ [1, 2.5] | sum }}{{ [{'n': 1}] | sum(attribute='n') }}", "3.51"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) ~ f('a') }}", "[1][a]"),
        ("{{ 'a-b'.split('-') | last }}{{ ' x '.strip() }}{{ 'a%s' % 1 }}{{ '{}{:>3}'.format('b', 2) }}", "bxa1b  2"),
        ("{{ 'aa' | replace('a', 'b') }}{{ 'aa'.replace('a', 'c', 1) }}{{ 'a\nb' | indent(2) }}", "bbcaa\n  b"),
        ("{{ 'x' * 3 }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ [1] + [2] }}{{ '5' | int + 1 }}{{ 2.345 | round(1) }}", "xxx83[1, 2]62.3"),
        ("{{ {'a': {'b': 'c'}}.a.b }}{{ {'a': 1}.items() | list }}", "c[('a', 1)]"),
        ("{{ (1, 2) == (1, 2) }}{{ 'a' in 'abc' }}{{ messages[0] in messages }}", "TrueTrueTrue"),
        ("{{ true }}{{ none }}{{ [true, 'a'] }}", "TrueNone[True, 'a']"),
    ],
)
def test_what_templates_can_do(source: str, expected: str):
    assert render(source) == expected


def test_tools_and_further_variables():
    assert (
        render("{{ tools[0].function.name }}{{ enable_thinking }}", tools=[{"function": {"name": "f"}}], enable_thinking=False) == "fFalse"
    )


def test_the_date():
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n\n{{ raise_exception('roles must alternate') }}", "m.gguf: chat template 'default', line 3: roles must alternate"),
        ("{% macro f() %}\n{{ 1 + 'a' }}{% endmacro %}\n\n{{ f() }}", "chat template 'default', line 2: unsupported operand"),
        ("\n{{ messages[0].nothing.more }}", "line 2: 'dict object' has no attribute 'nothing'"),
        ("\n{% if %}", "chat template 'default', line 2: Expected an expression"),
        ("a\n{{ x | nope }}", "line 2: No filter named 'nope'"),
        ("{{ 'a' | batch(3) }}", "line 1: No filter named 'batch'"),
        ("x" * 300_000, "has 300000 characters, expected at most 262144"),
    ],
)
def test_errors_name_the_file_the_template_and_the_line(source: str, message: str):
    with pytest.raises(InvalidArgumentError) as caught:
        render(source)
    assert message in str(caught.value)


@pytest.mark.parametrize("messages", ["hi", None, [1], {"role": "user"}])
def test_messages_have_to_be_a_list_of_objects(messages: Any):
    with pytest.raises(InvalidArgumentError, match="not a list of objects"):
        render("", messages)


def test_rendering_does_not_change_the_messages():
    messages = [{"role": "user", "content": ["a"]}]
    for source in ("{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}", "{{ messages[0].content.clear() }}"):
        with pytest.raises(InvalidArgumentError, match="is unsafe"):
            render(source, messages)
    assert messages == [{"role": "user", "content": ["a"]}]
