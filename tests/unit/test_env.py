"""The typed environment rows and the line writer (floor 0)."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vllm_cpp import env, log

PACKAGE = Path(env.__file__).parent


@pytest.mark.parametrize("text", ["", "0", "false", "FALSE", "off", "Off", "no", "NO"])
def test_a_switch_is_off_for_each_off_word(monkeypatch, text):
    monkeypatch.setenv("VT_MOE_EXPERT_STREAM", text)
    assert env.get("VT_MOE_EXPERT_STREAM") is False


@pytest.mark.parametrize("text", ["1", "on", "yes", "true", "2", " 0", "none", "-"])
def test_a_switch_is_on_for_everything_else(monkeypatch, text):
    monkeypatch.setenv("VT_MOE_EXPERT_STREAM", text)
    assert env.get("VT_MOE_EXPERT_STREAM") is True


@pytest.mark.parametrize("text", ["banana", "", "0", "000", "-1", "+1", " 1", "1 ", "1.0", "1e3", "0x10", "١", "9" * 30])
def test_a_count_that_is_not_plain_digits_above_zero_is_ignored(monkeypatch, text):
    monkeypatch.setenv("VT_MOE_EXPERT_STREAM_SLOTS", text)
    assert env.get("VT_MOE_EXPERT_STREAM_SLOTS") is None


def test_a_count_reads_digits_and_leading_zeros(monkeypatch):
    monkeypatch.setenv("VT_MOE_EXPERT_STREAM_SLOTS", "0004000")
    assert env.get("VT_MOE_EXPERT_STREAM_SLOTS") == 4000


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("68719476736", 68719476736), ("-0", None), ("1 ", None), ("1G", None), ("", None)])
def test_a_budget_of_zero_is_legal_and_a_typo_never_becomes_zero(monkeypatch, text, value):
    monkeypatch.setenv("VT_DEVICE_WEIGHT_BUDGET_BYTES", text)
    assert env.get("VT_DEVICE_WEIGHT_BUDGET_BYTES") == value


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("4096", 4096), ("4097", None)])
def test_a_number_of_layers_is_bounded(monkeypatch, text, value):
    monkeypatch.setenv("VT_N_CPU_MOE", text)
    assert env.get("VT_N_CPU_MOE") == value


def test_an_empty_text_is_unset(monkeypatch):
    monkeypatch.setenv("VLLM_CPP_CACHE_DIR", "")
    assert env.text("VLLM_CPP_CACHE_DIR") is None
    monkeypatch.setenv("VLLM_CPP_CACHE_DIR", "/some/where")
    assert env.text("VLLM_CPP_CACHE_DIR") == "/some/where"


def test_an_unset_variable_is_none(monkeypatch):
    monkeypatch.delenv("VT_GGUF_MMAP", raising=False)
    assert env.get("VT_GGUF_MMAP") is None
    assert env.switch("VT_GGUF_MMAP") is None


def test_a_host_that_calls_setenv_after_python_started_is_heard():
    libc = ctypes.CDLL(None)
    libc.setenv(b"VT_MOE_EXPERT_STREAM_SLOTS", b"77", 1)
    try:
        assert env.get("VT_MOE_EXPERT_STREAM_SLOTS") == 77
    finally:
        libc.unsetenv(b"VT_MOE_EXPERT_STREAM_SLOTS")
    assert env.get("VT_MOE_EXPERT_STREAM_SLOTS") is None


def test_an_unknown_name_is_a_mistake_of_ours():
    with pytest.raises(KeyError):
        env.get("VT_NO_SUCH_THING")


def test_every_variable_named_in_the_package_has_a_row():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    named = set(re.findall(r"\b(?:VT|VLLM_CPP)_[A-Z0-9_]+\b", text))
    assert named <= set(env.ROWS), sorted(named - set(env.ROWS))


def test_a_row_is_read_somewhere_or_says_that_it_does_nothing():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path != Path(env.__file__))
    for row in env.ROWS.values():
        assert (f'"{row.name}"' in text) is row.acts, row.name
        assert row.doc.startswith("nothing here: ") is not row.acts, row.name


def test_nobody_else_reads_the_environment():
    reads = re.compile(r"os\.(environ|getenv)\b(?!`)|Path\.home|expanduser")  # the last two read HOME
    readers = [path.name for path in PACKAGE.rglob("*.py") if reads.search(path.read_text(encoding="utf-8"))]
    assert readers in ([], ["env.py"])


def test_a_line_is_one_whole_line(capfd):
    threads = [threading.Thread(target=lambda i=i: [log.line(f"{i}" * 200) for _ in range(50)]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 200
    assert all(len(set(line)) == 1 and len(line) == 200 for line in lines)


def test_once_says_it_once(capfd):
    log.forget()
    assert log.once("key", "said") is True
    assert log.once("key", "said") is False
    assert capfd.readouterr().err == "said\n"


def test_what_was_said_is_not_remembered_without_end(capfd):
    log.forget()
    for number in range(5000):
        log.once(f"key {number}", "said")
        assert log.once("heard every time", "said") is (number == 0)
    assert len(log._said) <= 1000
    assert log.once("key 4999", "said") is False
    log.forget()


def test_undecodable_bytes_and_lone_surrogates_print(capfdbinary):
    log.line("a\udcffb")
    log.line("c\ud800d")
    assert capfdbinary.readouterr().err == b"a\xffb\nc\\ud800d\n"


def test_a_closed_stderr_is_no_error():
    code = "import os; os.close(2); from vllm_cpp import log; log.line('lost'); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(PACKAGE.parent)}, stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"alive\n"
