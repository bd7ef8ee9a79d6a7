"""Documentation that is made from code, and documentation that is run: nothing on these pages may say what is not so."""

from __future__ import annotations

import json
import re
import shlex

import pytest

import tiny_models
import vllm_cpp
from docs import generate
from vllm_cpp import api, env, log
from vllm_cpp.cli import arguments
from vllm_cpp.config.offload import OffloadDocument, install, parse
from vllm_cpp.config.offload.document import VARIABLES
from vllm_cpp.config.offload.install import reset
from vllm_cpp.config.offload.keys import KEYS
from vllm_cpp.errors import VllmError
from vllm_cpp.kernels.cpu import registry
from vllm_cpp.quants import ENCODINGS

DOCS = generate.ROOT / "docs"
STATUSES = {"INVALID_ARGUMENT": 1, "MODEL_LOAD": 2, "RUNTIME": 3, "UNKNOWN": 4}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in set(env.ROWS) - {"VLLM_CPP_CACHE_DIR"}:
        monkeypatch.delenv(name, raising=False)
    reset()
    log.forget()
    yield
    reset()
    log.forget()


@pytest.mark.parametrize("page", generate.PAGES)
def test_a_generated_page_is_up_to_date(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert generate.generated(page) == text, "run: make docs"
    assert text.count("generated -->") == text.count("<!-- end -->") > 0


def test_every_key_with_a_variable_is_in_the_table_once():
    fields = [key.field for key in KEYS if key.field]
    assert sorted(fields) == sorted(VARIABLES)
    assert all(VARIABLES[field] in env.ROWS for field in fields)
    for path in {key.path for key in KEYS if not key.path.endswith(("pattern", "device"))}:
        document: object = None
        for name in reversed(path.split(".")):
            document = {name: document}
        assert parse(document) == OffloadDocument()


def blocks(page: str, language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```\n", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for named, text in fences if named == language]


def test_the_documents_commands_and_lines_on_the_page_are_real(capfd, monkeypatch):
    documents = blocks("weight-offload.md", "json")
    assert documents
    for document in documents:
        assert parse(document) != OffloadDocument()
    commands = [line for block in blocks("weight-offload.md", "sh") for line in block.splitlines()]
    assert commands
    for command in commands:
        program, *flags = shlex.split(command)
        assert program == "vllm-cli"
        assert arguments.parse(flags).model == "model.gguf"
    for code in [line for block in blocks("weight-offload.md", "python") for line in block.splitlines()]:
        with pytest.raises(VllmError, match=r"model\.gguf: no such file"):
            eval(code, {"vllm_cpp": vllm_cpp})
    monkeypatch.setenv("VT_GGUF_MMAP", "1")
    reset()
    log.forget()
    capfd.readouterr()
    install(parse({"vllm_cpp": {"mmap": {"enabled": True, "prefault": False}, "expert_stream": {"slots": 4000}}}))
    assert capfd.readouterr().err in blocks("weight-offload.md", "")


def test_the_readme_names_every_encoding_as_read_or_refused():
    bullet = next(part for part in (generate.ROOT / "README.md").read_text(encoding="utf-8").split("\n- ") if "Read are" in part)
    read, _, refused = bullet.partition(";")
    assert re.findall(r"`(\w+)`", read) == list(registry.NAMES)
    assert sorted(re.findall(r"`(\w+)`", refused.partition("refused by name")[0])) == sorted(set(ENCODINGS) - set(registry.NAMES))


def rows(heading: str) -> list[tuple[str, list[str], str, str]]:
    """(mistake, calls, status, text) of the table under a heading of statuses.md."""
    section = (DOCS / "statuses.md").read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("| ")]
    return [(mistake, re.findall(r"`(.*?)`", calls), status, text) for mistake, calls, status, text in found[1:]]


def as_regex(text: str) -> str:
    return ".*".join(re.escape(part.strip()) for part in text.split("…"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("docs") / "tiny.gguf"
    tiny_models.build("llama", dtype="F32").write(path)
    return path


def fails(ids, row):
    raise RuntimeError("no more")


def test_each_mistake_has_its_status(tiny):
    file = tiny.with_name("none.gguf")
    file.write_text("no model", encoding="utf-8")
    opened = []

    def load(path, **keywords):
        opened.append(api.load(path, threads=1, **keywords))
        return opened[-1]

    mistakes = rows("Mistakes, one by one")
    assert len(mistakes) > 30
    for mistake, calls, status, text in mistakes:
        for call in calls:
            reset()
            names = {"load": load, "MODEL": tiny, "FILE": file, "FAILS": fails}
            if "model." in call:
                names["model"] = load(tiny)
            try:
                eval(call, names)
            except VllmError as error:
                caught = error
            else:
                pytest.fail(f"{mistake}: {call} is no mistake")
            assert caught.status == STATUSES[status], (mistake, call, caught)
            assert re.fullmatch(as_regex(text), str(caught), re.DOTALL), (mistake, call, str(caught), text)
            while opened:
                opened.pop().close()


def test_the_statuses_are_the_header_s():
    header = (generate.ROOT / "include" / "vllm.h").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(VLLM_\w+)` \| (\d)", (DOCS / "statuses.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == 5
    for name, number in listed:
        assert re.search(rf"\b{name} = {number}\b", header), name


def test_json_of_the_page_is_what_it_says_it_refuses():
    said = dict(re.findall(r"^\| `(\{.*\})` \| (.*) \|$", (DOCS / "weight-offload.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert len(said) > 10
    assert all(json.loads(document) is not None for document in said)
