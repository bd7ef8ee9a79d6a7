"""Fixtures of the C library's tests: a wheel, the prefix it is installed in, programs compiled once, and a model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clibrary import PROGRAMS, ROOT, Installation, checked, install


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without what was built in it, so that nothing is left there and nothing stale is picked up."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.so.*", "*.egg-info")
    shutil.copytree(ROOT / "include", copy / "include")
    shutil.copytree(ROOT / "engine", copy / "engine", ignore=unwanted)
    shutil.copytree(ROOT / "capi", copy / "capi", ignore=unwanted, symlinks=True)
    for generated in ("lib", "include"):
        shutil.rmtree(copy / "capi" / "vllm_capi" / generated, ignore_errors=True)
    return copy


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as a wheel."""
    target = tmp_path_factory.mktemp("wheel")
    checked([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(target), str(source)])
    return next(target.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    prefix = tmp_path_factory.mktemp("prefix")
    install(prefix, str(wheel))
    return Installation(prefix, tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def program(installed: Installation) -> Callable[[str], Path]:
    """A program of programs/, compiled as C11 at first use."""
    built: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in built:
            built[name] = installed.compile(PROGRAMS / f"{name}.c", name, f"-I{PROGRAMS}")
        return built[name]

    return build


@pytest.fixture(scope="session")
def model(tiny_model: Callable[[str], Path]) -> Path:
    """A model that loads in a moment; it knows 300 tokens and talks nonsense."""
    return tiny_model("llama-s1-z0-F32")


@pytest.fixture(scope="session")
def failing(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """A prefix in which `fails.gguf` is a model whose steps fail now and then."""
    prefix = tmp_path_factory.mktemp("failing")
    install(prefix, str(wheel))
    [site] = prefix.glob("lib/python*/site-packages")
    shutil.copy(Path(__file__).with_name("harness.py"), site / "harness.py")
    (site / "harness.pth").write_text(f"{ROOT / 'tests'}\nimport harness\n")
    return Installation(prefix, tmp_path_factory.mktemp("failing-programs"))
