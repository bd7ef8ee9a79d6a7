"""A tokenizer_config.json beside the model: what is taken from it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_cpp import log
from vllm_cpp.errors import InvalidArgumentError, ModelLoadError
from vllm_cpp.tokenizer import ChatTemplate, Tokenizer, read_tokenizer_config
from vocabularies import CONTROL, byte_pair_keys, file

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    extra = [("<s>", CONTROL), ("<end>", CONTROL)]
    keys = byte_pair_keys(extra=extra, bos_token_id=256, eos_token_id=256, tokenizer__chat_template="of the file")
    return file(tmp_path / "m.gguf", **keys)


@pytest.fixture
def config(tmp_path: Path):
    log.forget()

    def write(**document: Any) -> Path:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(document))
        return tmp_path / "tokenizer_config.json"

    return write


def test_the_template_and_the_special_texts_are_taken(model: Path, config):
    read = read_tokenizer_config(
        config(chat_template="{{ eos_token }}{{ messages[0].content }}", eos_token={"content": "<end>"}, bos_token=None)
    )
    assert ChatTemplate.from_gguf(model, read).render(MESSAGES) == "<end>hi"
    tokenizer = Tokenizer.from_gguf(model, read)
    assert tokenizer.eos_id == 257
    assert tokenizer.eos_ids == {256, 257}
    assert tokenizer.bos_id == 256


def test_a_directory_will_do_and_a_template_file_comes_first(model: Path, config):
    folder = config(chat_template="of the config").parent
    assert ChatTemplate.from_gguf(model, read_tokenizer_config(folder)).render(MESSAGES) == "of the config"
    (folder / "chat_template.jinja").write_text("of its own file")
    assert ChatTemplate.from_gguf(model, read_tokenizer_config(folder)).render(MESSAGES) == "of its own file"


def test_without_a_template_the_file_s_own_stays(model: Path, config):
    assert ChatTemplate.from_gguf(model, read_tokenizer_config(config(bos_token="<s>"))).render(MESSAGES) == "of the file"


def test_named_templates(model: Path, config):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = ChatTemplate.from_gguf(model, read_tokenizer_config(config(chat_template=named)))
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, tools=[{"type": "function"}]) == "tools"


def test_what_is_not_obeyed_is_said(config, capfd: pytest.CaptureFixture[str]):
    read_tokenizer_config(config(add_bos_token=False, tokenizer_class="X"))
    assert "the GGUF file decides over add_bos_token" in capfd.readouterr().err


def test_a_special_text_has_to_be_a_token(model: Path, config):
    read = read_tokenizer_config(config(eos_token="<nowhere>"))
    with pytest.raises(InvalidArgumentError, match=r"tokenizer_config.json: eos_token is '<nowhere>', which is no token of .*m.gguf"):
        Tokenizer.from_gguf(model, read)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "a JSON list, expected an object"),
        ('{"eos_token": 3}', "eos_token is 3, expected a token's text"),
        ('{"chat_template": [{"name": "default"}]}', "neither a text nor a list of name and template"),
        ('{"chat_template": 3}', "neither a text nor a list"),
        ('{"chat_template": [{"name": "default", "template": 3}]}', "names a template that is no text"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_refused(tmp_path: Path, text: str | bytes, message: str):
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ModelLoadError, match=message):
        read_tokenizer_config(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ModelLoadError, match=r"tokenizer_config.json: cannot be read: No such file"):
        read_tokenizer_config(tmp_path)
