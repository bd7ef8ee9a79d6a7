"""The process around the library: its signals, its end, its environment, and the other languages it may be written in."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from clibrary import PROGRAMS, ROOT, Installation

Build = Callable[[str], Path]
KOFFI = ROOT / "build" / "node_modules" / "koffi"
MODES = ["return", "in-flight", "busy", "stream-callback", "request-callback", "other-thread", "atexit", "_exit"]


def test_signals_stay_the_hosts(installed: Installation, program: Build, model: Path) -> None:
    """Dispositions, mask and locale as before, no signal on a library thread; and at the end Ctrl-C kills, as it does a C program."""
    done = installed.run(program("signals"), model)
    assert done.returncode == -signal.SIGINT, done.stderr


@pytest.mark.parametrize("mode", MODES)
def test_exit(installed: Installation, program: Build, model: Path, mode: str) -> None:
    for _ in range(3):
        done = installed.run(program("exits"), mode, model)
        assert done.returncode == 7, done.stderr


def test_exit_while_python_starts(installed: Installation, program: Build, model: Path) -> None:
    for milliseconds in (0, 10, 20, 40, 60, 80, 120, 200, 400):
        done = installed.run(program("exits"), "while-starting", model, milliseconds)
        assert done.returncode == 7, (milliseconds, done.stderr)


def test_an_empty_environment(installed: Installation, model: Path) -> None:
    complete = installed.compile(ROOT / "examples_c" / "complete.c", "complete")
    done = installed.run(complete, model, env={}, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "ended by: " in done.stdout


def test_a_misleading_environment(installed: Installation, model: Path, tmp_path: Path) -> None:
    """What would break another Python does not reach ours."""
    (tmp_path / "numpy.py").write_text("raise ImportError('not this one')\n")
    misleading = {"PYTHONHOME": "/nonexistent", "PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONSTARTUP": "/nonexistent"}
    complete = installed.compile(ROOT / "examples_c" / "complete.c", "complete-misled")
    done = installed.run(complete, model, env={**installed.environment, **misleading}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["libvllm.so", "libvllm.so.0"])
def test_a_backend_that_binds_by_name(installed: Installation, model: Path, name: str) -> None:
    consumer = installed.compile(PROGRAMS / "consumer.c", "consumer", flags="--cflags")
    done = installed.run(consumer, installed.lib / name, model)
    assert done.returncode == 0, done.stderr


def test_a_python_host(installed: Installation, model: Path) -> None:
    done = installed.run(installed.python, PROGRAMS / "host.py", installed.lib / "libvllm.so", model)
    assert done.returncode == 0, done.stderr
    assert "deltas" in done.stdout


def test_a_python_host_that_is_interrupted(installed: Installation, model: Path) -> None:
    """The call says so, what it began is cancelled, the host's own handler runs, and the engine serves on."""
    done = installed.run(installed.python, PROGRAMS / "interrupted.py", installed.lib / "libvllm.so", model)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


@pytest.mark.parametrize("language", ["c", *(["node"] if KOFFI.is_dir() else [])])
def test_a_host_that_opens_the_library_for_itself(installed: Installation, model: Path, language: str) -> None:
    """With RTLD_LOCAL. Node is among the hosts, and in the report, once `make node` has fetched its half: tests fetch nothing."""
    if language == "node":
        host, arguments = "node", [PROGRAMS / "host.js", KOFFI, installed.lib / "libvllm.so", model]
    else:
        host = installed.compile(ROOT / "examples_c" / "dlopen.c", "dlopen-host", flags="--cflags")
        arguments = [model, installed.lib / "libvllm.so"]
    done = installed.run(host, *arguments)
    assert done.returncode == 0, done.stderr


def test_the_process_stays_quiet(installed: Installation, model: Path) -> None:
    """stdout is the host's; stderr gets lines only where there is something to say."""
    source = installed.build / "quiet.c"
    source.write_text(
        '#include "check.h"\nint main(int argc, char** argv) {\n  (void)argc;\n  vllm_engine* engine = load(argv[1]);\n'
        "  vllm_sampling_params sampling = greedy(2);\n  vllm_completion answer;\n"
        '  CHECK(vllm_complete(engine, "x", &sampling, &answer) == VLLM_OK);\n  vllm_completion_free(&answer);\n'
        "  vllm_engine_free(engine);\n  return 0;\n}\n"
    )
    done = installed.run(installed.compile(source, "quiet", f"-I{PROGRAMS}"), model)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_cpu_is_idle_when_nothing_is_asked(installed: Installation, model: Path) -> None:
    source = installed.build / "idle.c"
    source.write_text(
        '#include <time.h>\n#include <unistd.h>\n#include "check.h"\nint main(int argc, char** argv) {\n  (void)argc;\n'
        "  vllm_engine* engine = load(argv[1]);\n  clock_t before = clock();\n  sleep(1);\n"
        '  printf("%ld\\n", (long)((clock() - before) * 1000 / CLOCKS_PER_SEC));\n  vllm_engine_free(engine);\n  return 0;\n}\n'
    )
    done = installed.run(installed.compile(source, "idle", f"-I{PROGRAMS}"), model)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300, "milliseconds of processor time in a second without a request"
