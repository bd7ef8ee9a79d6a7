"""Broken installations: a status and a text, never a crash, an exit or a traceback, and the plain C part works on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from clibrary import PROGRAMS, Installation


@pytest.fixture(scope="module")
def broken_client(installed: Installation) -> Path:
    """Loads a model and prints "status text"; checks that the failure sticks and that nothing else went wrong."""
    source = installed.build / "broken.c"
    source.write_text(
        '#include "check.h"\nint main(int argc, char** argv) {\n  (void)argc;\n'
        "  vllm_model_params params = vllm_model_params_default();\n  params.model_path = argv[1];\n"
        "  vllm_engine* engine = (vllm_engine*)1;\n  vllm_status status = vllm_engine_load(&params, &engine);\n"
        '  printf("%d %s\\n", status, vllm_last_error());\n  char first[4096];\n  strcpy(first, vllm_last_error());\n'
        "  CHECK(!engine && vllm_engine_load(&params, &engine) == status && !strcmp(first, vllm_last_error()));\n"
        "  vllm_sampling_params sampling = vllm_sampling_params_default();\n  vllm_completion answer;\n"
        "  CHECK(vllm_complete((vllm_engine*)16, 0, &sampling, &answer) == VLLM_ERR_INVALID_ARGUMENT);\n"
        "  CHECK(vllm_abi_version() == 21 && !vllm_request_done((vllm_request*)16));\n  vllm_engine_free((vllm_engine*)16);\n"
        "  return 0;\n}\n"
    )
    return installed.compile(source, "broken", f"-I{PROGRAMS}")


def told(client: Path, library: Path, installed: Installation, model: Path, **environment: str) -> str:
    """What the client is told when it runs with the library at `library`."""
    done = installed.run(client, model, env={**installed.environment, "LD_LIBRARY_PATH": str(library), **environment}, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    status, text = done.stdout.split(" ", 1)
    assert status == "3", done.stdout
    assert text.startswith("vllm_engine_load: ")
    return text


def write(path: Path, text: str) -> None:
    path.write_text(text)


def embedding_module(site: Path) -> Path:
    return next(site.glob("vllm_capi/lib/_vllm_embed*"))


def empty(package: Path) -> None:
    shutil.rmtree(package)
    package.mkdir()
    write(package / "__init__.py", "")


BREAKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no embedding module": (
        lambda site: next(site.glob("vllm_capi/lib/_vllm_embed*")).unlink(),
        "is missing: the installation is incomplete",
    ),
    "an embedding module that is no library": (lambda site: write(next(site.glob("vllm_capi/lib/_vllm_embed*")), "text"), "Python side"),
    "no bridge": (lambda site: (site / "vllm_capi" / "bridge.py").unlink(), "No module named 'vllm_capi.bridge'"),
    "a bridge that is no Python": (lambda site: write(site / "vllm_capi" / "bridge.py", "def ("), "SyntaxError"),
    "an empty engine package": (lambda site: empty(site / "vllm_cpp"), "No module named 'vllm_cpp.errors'"),
    "an engine that cannot be imported": (lambda site: write(site / "vllm_cpp" / "core.py", "import no_such_module"), "no_such_module"),
    "an api that exits": (lambda site: write(site / "vllm_cpp" / "api.py", "raise ImportError('half a wheel')"), "half a wheel"),
    "no packages at all": (lambda site: (site / "needs.pth").unlink(), "_cffi_backend"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_broken_installation(installed: Installation, broken_client: Path, model: Path, tmp_path: Path, how: str) -> None:
    prefix = tmp_path / "prefix"
    shutil.copytree(installed.prefix, prefix, symlinks=True)
    [site] = prefix.glob("lib/python*/site-packages")
    for cache in site.rglob("__pycache__"):
        shutil.rmtree(cache)
    break_it, expected = BREAKS[how]
    break_it(site)
    assert expected in told(broken_client, site / "vllm_capi" / "lib", installed, model)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("VLLM_PYTHON", "/nonexistent/python", "VLLM_PYTHON is '/nonexistent/python'"),
        ("VLLM_PYTHON", "/bin/sh", "VLLM_PYTHON is '/bin/sh'"),
        ("VLLM_LIBPYTHON", "/nonexistent/libpython.so", "/nonexistent/libpython.so: cannot open shared object file"),
        ("VLLM_LIBPYTHON", "/bin/sh", "VLLM_LIBPYTHON"),
    ],
)
def test_misdirected(installed: Installation, broken_client: Path, model: Path, variable: str, value: str, expected: str) -> None:
    assert expected in told(broken_client, installed.lib, installed, model, **{variable: value})


def test_a_moved_prefix_is_found_where_it_is(installed: Installation, model: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "moved"
    shutil.copytree(installed.prefix, prefix, symlinks=True)
    moved = Installation(prefix, tmp_path)
    [site] = prefix.glob("lib/python*/site-packages")
    complete = installed.compile(PROGRAMS / "completing.c", "completing-moved", f"-I{PROGRAMS}")
    environment = {"LD_LIBRARY_PATH": str(site / "vllm_capi" / "lib")}
    done = moved.run(complete, model, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr


def test_vllm_python_chooses_the_environment(installed: Installation, broken_client: Path, model: Path, tmp_path: Path) -> None:
    """A library without its environment, told of one: it brings its own bridge, and the packages come from there."""
    alone = tmp_path / "alone"
    [site] = installed.prefix.glob("lib/python*/site-packages")
    for package in ("vllm_capi", "vllm_cpp"):
        shutil.copytree(site / package, alone / package)
    completing = installed.compile(PROGRAMS / "completing.c", "completing-alone", f"-I{PROGRAMS}")
    environment = {"LD_LIBRARY_PATH": str(alone / "vllm_capi" / "lib"), "VLLM_PYTHON": installed.python}
    done = installed.run(completing, model, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr
