"""The sources behind a kernel: found through every kind of import, and an edit in any of them changes the hash."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_cpp.kernels
from vllm_cpp.kernels import sources

KERNELS = Path(vllm_cpp.kernels.__file__).parent
MODULES = {
    ".".join(("vllm_cpp.kernels", *path.relative_to(KERNELS).with_suffix("").parts)): path
    for path in KERNELS.rglob("*.py")
    if path.name != "__init__.py"
}


def imported(path: Path) -> set[str]:
    """Kernel modules that a file's import statements name, as Python's own parser sees them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import, which `sources` does not follow"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & set(MODULES)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_import_is_followed(module: str) -> None:
    found, new = set(), {module}
    while new:
        name = new.pop()
        found.add(name)
        new |= imported(MODULES[name]) - found
    assert found <= set(sources.modules_behind(module))


def test_a_kernel_does_not_hang_on_what_it_does_not_import() -> None:
    behind = sources.modules_behind("vllm_cpp.kernels.cpu.encodings.q8_0")
    assert "vllm_cpp.kernels.cpu.encodings.a32" in behind
    assert not {"vllm_cpp.kernels.cpu.encodings.q8k", "vllm_cpp.kernels.cpu.attention", "vllm_cpp.env", "vllm_cpp.api"} & set(behind)


def copy(tmp_path: Path) -> None:
    """The kernel sources, where they can be edited."""
    (tmp_path / "vllm_cpp").mkdir()
    (tmp_path / "vllm_cpp" / "__init__.py").touch()
    for name in ("env", "log", "errors"):
        (tmp_path / "vllm_cpp" / f"{name}.py").write_bytes((KERNELS.parent / f"{name}.py").read_bytes())
    for path in KERNELS.rglob("*.py"):
        to = tmp_path / "vllm_cpp" / "kernels" / path.relative_to(KERNELS)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(path.read_bytes())


def edit(tmp_path: Path) -> None:
    with (tmp_path / "vllm_cpp" / "kernels" / "cpu" / "encodings" / "a32.py").open("a") as file:
        file.write("# edited\n")


def hashes(tmp_path: Path, after_import: str = "") -> list[str]:
    code = f"""
from vllm_cpp.kernels import sources
{after_import}
print(*(sources.hash_of("vllm_cpp.kernels.cpu." + name) for name in ("encodings.q8_0", "encodings.q4_k", "attention")))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_an_edit_behind_a_kernel_changes_its_hash_and_no_others(tmp_path: Path) -> None:
    copy(tmp_path)
    before = hashes(tmp_path)
    assert len(set(before)) == 3
    assert before == hashes(tmp_path)
    edit(tmp_path)
    assert [a == b for a, b in zip(before, hashes(tmp_path), strict=True)] == [False, True, True]


def test_what_was_edited_after_the_start_is_kept_for_nobody(tmp_path: Path) -> None:
    """The process may have imported the text before the edit: its hash must be nobody else's."""
    copy(tmp_path)
    edited = tmp_path / "vllm_cpp" / "kernels" / "cpu" / "encodings" / "a32.py"
    at_run_time = hashes(tmp_path, f"import os, time; os.utime({str(edited)!r}, (time.time() + 9,) * 2)")
    os.utime(edited, (0, 0))
    assert [a == b for a, b in zip(at_run_time, hashes(tmp_path), strict=True)] == [False, True, True]
