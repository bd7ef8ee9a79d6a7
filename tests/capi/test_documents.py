"""The offload document through the installed library: the words that Python and the shell use, and two engines in one C program."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from clibrary import PROGRAMS, ROOT, Installation
from vllm_cpp import api, env, log
from vllm_cpp.config.offload.install import reset
from vllm_cpp.errors import VllmError

Build = Callable[[str], Path]
NOWHERE = "/nonexistent/model.gguf"

# Wrong in every way that the specification of the document names, and accepted ones, of which the path is then refused.
DOCUMENTS = [
    *("{not json", "[]", "3", '{"vllm-cpp":{}}', '{"uva":5}', '{"uva":{},"uva":{}}', '{"offload_backend":3}', '{"offload_backend":"disk"}'),
    *(
        '{"uva":{"cpu_offload_GB":1}}',
        '{"uva":{"cpu_offload_gb":"1"}}',
        '{"uva":{"cpu_offload_gb":-0.5}}',
        '{"uva":{"cpu_offload_gb":1e999}}',
    ),
    *('{"uva":{"cpu_offload_gb":NaN}}', '{"uva":{"cpu_offload_params":[1]}}', '{"prefetch":{"offload_group":1}}', '{"prefetch":[]}'),
    *(f'{{"prefetch":{{"{key}":{value}}}}}' for key in ("offload_group_size", "offload_num_in_group") for value in ("-1", "1.0", "true")),
    '{"prefetch":{"offload_group_size":4,"offload_num_in_group":5}}',
    '{"prefetch":{"offload_group_size":4,"offload_prefetch_step":0}}',
    *(f'{{"vllm_cpp":{{"{group}":{{"typo":1}}}}}}' for group in ("mmap", "expert_stream", "device_fit", "placement")),
    *(f'{{"vllm_cpp":{{"expert_stream":{{"slots":{value}}}}}}}' for value in ("0", "-1", "8000.0", '"8000"', "true", "9" * 30)),
    *('{"vllm_cpp":{"mmap":{"enabled":1}}}', '{"vllm_cpp":{"device_fit":{"weight_budget_bytes":-1}}}', '{"vllm_cpp":[]}'),
    *(f'{{"vllm_cpp":{{"placement":{{"overrides":{value}}}}}}}' for value in ("{}", "[3]", "[{}]", '[{"pattern":"(","device":"cpu"}]')),
    *(f'{{"vllm_cpp":{{"placement":{{"overrides":[{{"pattern":"a","device":"{device}"}}]}}}}}}' for device in ("tpu", "cuda", "é\\n")),
    *('{"vllm_cpp":{"placement":{"n_cpu_moe":4097}}}', '{"vllm_cpp":{"placement":{"fit":true,"n_cpu_moe":1}}}', '{"é\\u0001":1}'),
    *("", " ", "{}", '{"vllm_cpp":{"mmap":{"enabled":true,"prefault":false}}}', '{"vllm_cpp":{"expert_stream":{"slots":9}}}'),
    '{"offload_backend":"uva","uva":{"cpu_offload_gb":1},"prefetch":{"offload_group_size":8}}',
]


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(env.ROWS) - {"VLLM_CPP_CACHE_DIR"}:
        monkeypatch.delenv(name, raising=False)
    reset()
    log.forget()


def in_python(document: str) -> tuple[int, str]:
    with pytest.raises(VllmError) as caught:
        api.load(NOWHERE, offload_config=document)
    return caught.value.status, str(caught.value)


@pytest.mark.usefixtures("_fresh")
def test_c_python_and_the_shell_say_the_same(
    installed: Installation, program: Build, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "documents").write_bytes(b"".join(document.encode() + b"\0" for document in DOCUMENTS))
    from_c = installed.run(program("documents"), tmp_path / "documents")
    assert from_c.returncode == 0, from_c.stderr
    capfd.readouterr()
    from_python = [in_python(document) for document in DOCUMENTS]
    lines = capfd.readouterr().err
    told = [tuple(answer.split(" ", 1)) for answer in from_c.stdout.split("\0")[:-1]]
    assert told == [(str(status), f"vllm_engine_load: {text}") for status, text in from_python]
    assert from_c.stderr == lines
    assert lines.count("\n") == 3
    reset()
    shell = str(installed.prefix / "bin" / "vllm-cli")
    for document in (*DOCUMENTS[3:6], *DOCUMENTS[10:12], DOCUMENTS[-1]):
        done = installed.run(shell, "--model", NOWHERE, "--prompt", "a", "--offload-config", document)
        status, text = in_python(document)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.endswith(f"vllm-cli: model load failed (status {status}): {text}\n")


@pytest.mark.parametrize("mode", ["forward", "backward", "partial", "equal", "inert"])
def test_two_engines(installed: Installation, program: Build, model: Path, mode: str) -> None:
    done = installed.run(program("residency"), mode, model)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("engine: ")]
    assert len(said) == len(set(said)), done.stderr
    assert "engine: device placement: fit has nothing to place, the engine's own device is cpu" in said


def test_engines_that_race_for_the_first_decision(installed: Installation, program: Build, model: Path) -> None:
    for _ in range(3):
        done = installed.run(program("residency"), "race", model)
        assert done.returncode == 0, done.stderr


def test_each_mistake_has_its_status(installed: Installation, model: Path, tmp_path: Path) -> None:
    """The lines of docs/statuses.md that are in C, compiled and run one by one."""
    section = (ROOT / "docs" / "statuses.md").read_text(encoding="utf-8").partition("\n## From C\n")[2]
    rows = re.findall(r"^\| .* \| `(.*)` \| (\w+) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) > 10
    checks = "".join(
        f'  {{ STATE; CHECK(({call}) == VLLM_ERR_{status}); told("{re.match(r"vllm_[a-z_]+", text)[0]}: ", {parts(text)}); '
        "vllm_engine_free(engine); }\n"
        for call, status, text in rows
    )
    source = tmp_path / "statuses.c"
    source.write_text(STATUSES_C.replace("CHECKS", checks), encoding="utf-8")
    quiet = ("-Wno-unused-variable", "-Wno-unused-but-set-variable")
    done = installed.run(installed.compile(source, "statuses", f"-I{PROGRAMS}", *quiet), model)
    assert done.returncode == 0, done.stderr


def parts(text: str) -> str:
    """The pieces around the dots, as arguments in C; NULL ends them."""
    pieces = [piece.strip() for piece in text.partition(": ")[2].split("…")]
    return ", ".join([*(json.dumps(piece) for piece in pieces if piece), "NULL"])


STATUSES_C = """#include <stdarg.h>
#include "check.h"

static const char* path;

static void told(const char* start, ...) {
  const char* error = vllm_last_error();
  CHECK(!strncmp(error, start, strlen(start)));
  va_list pieces;
  va_start(pieces, start);
  for (const char* piece; (piece = va_arg(pieces, const char*));) CHECK(strstr(error, piece));
  va_end(pieces);
}

#define STATE                                                                \\
  vllm_engine* engine = load(path);                                          \\
  vllm_engine* other = NULL;                                                 \\
  vllm_model_params params = vllm_model_params_default();                    \\
  params.model_path = path;                                                  \\
  vllm_sampling_params sampling = vllm_sampling_params_default();            \\
  vllm_completion answer;                                                    \\
  char* text;                                                                \\
  const char* texts[] = {"a"};                                               \\
  vllm_embedding_result embedding;                                           \\
  vllm_speech_model_params speech_params = vllm_speech_model_params_default(); \\
  speech_params.path = path;                                                 \\
  vllm_speech_engine* speech

int main(int argc, char** argv) {
  (void)argc;
  path = argv[1];
CHECKS  return 0;
}
"""
