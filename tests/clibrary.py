"""The C library as a user has it: an installed prefix, and programs compiled against it.

Owns how a prefix is made (a virtual environment of its own, with the project installed from a wheel; the packages that the project needs
come from the environment that runs the tests) and how a program is compiled (with pkg-config and nothing else). Must not look into the
source tree but for the programs themselves.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests" / "capi" / "programs"
C_SOURCES = ROOT / "capi" / "vllm_capi" / "c"
HEADER = ROOT / "include" / "vllm.h"
STRICT = ("-Wall", "-Wextra", "-pedantic", "-Werror")


def build_module() -> ModuleType:
    """The build's own module, from the tree: what it reads is not installed."""
    spec = importlib.util.spec_from_file_location("vllm_capi_build", C_SOURCES.parent / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checked(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command that has to succeed, and shows all it said when it does not."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@dataclass(frozen=True)
class Installation:
    """An installed prefix."""

    prefix: Path
    build: Path

    @property
    def python(self) -> str:
        return str(self.prefix / "bin" / "python")

    def config(self, *flags: str) -> str:
        return checked([str(self.prefix / "bin" / "vllm-config"), *flags], env=self._clean).stdout.strip()

    @property
    def lib(self) -> Path:
        return Path(self.config("--libdir"))

    @property
    def _clean(self) -> dict[str, str]:
        """The tester's environment without what would change which Python or library is found."""
        misleading = ("PYTHON", "VLLM_PYTHON", "VLLM_LIBPYTHON", "LD_")
        return {name: value for name, value in os.environ.items() if not name.startswith(misleading)}

    @property
    def environment(self) -> dict[str, str]:
        """The same, where pkg-config finds this installation."""
        return {**self._clean, "PKG_CONFIG_PATH": self.config("--pkgconfigdir")}

    def pkg_config(self, *flags: str) -> list[str]:
        return checked(["pkg-config", *flags, "vllm"], env=self.environment, cwd="/").stdout.split()

    def compile(
        self, source: Path, name: str, *more: str, compiler: str = "cc", std: str = "-std=c11", flags: str = "--cflags --libs"
    ) -> Path:
        """A program, built from another directory than the source's or the library's."""
        program = self.build / name
        command = [compiler, std, "-g", *STRICT, "-D_GNU_SOURCE", *more, str(source), *self.pkg_config(*flags.split()), "-pthread", "-ldl"]
        checked([*command, "-o", str(program)], cwd=self.build)
        return program

    def run(self, program: str | Path, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        options = {"env": self.environment, "timeout": 240, **options}
        return subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, check=False, **options)


def install(prefix: Path, *what: str) -> None:
    """A new prefix with the project in it: `what` is a wheel, or pip's flags and a source tree."""
    checked([sys.executable, "-m", "venv", "--without-pip", str(prefix)])
    python = str(prefix / "bin" / "python")
    site = checked([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).stdout.strip()
    # After the prefix's own directory in the path, and without its .pth files: an editable install there does not come along.
    ours = dict.fromkeys(entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages")))
    Path(site, "needs.pth").write_text("\n".join(ours) + "\n")
    # The needs may hold this project too, installed: it is neither enough nor to be removed.
    checked([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--ignore-installed", "--no-deps", "--no-index", *what])
