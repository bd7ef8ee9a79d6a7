"""The header: what it declares is what the library exports, laid out as ABI 21 says."""

from __future__ import annotations

import os
import re
import shutil
from importlib import metadata
from pathlib import Path

import pytest

from clibrary import C_SOURCES, HEADER, PROGRAMS, ROOT, STRICT, Installation, build_module, checked

build = build_module()

BASELINE = ROOT / "capi" / "libvllm.abi.xml"
ABIDW = ["abidw", "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs", "--no-elf-needed", "--no-parameter-names"]


@pytest.mark.parametrize(("compiler", "std"), [("cc", "-std=c11"), ("c++", "-std=c++17")])
def test_layout_signatures_and_defaults(installed: Installation, compiler: str, std: str) -> None:
    language = ["-x", "c++"] if compiler == "c++" else []
    program = installed.compile(PROGRAMS / "layout.c", f"layout-{compiler}", f"-I{PROGRAMS}", *language, compiler=compiler, std=std)
    done = installed.run(program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == metadata.version("vllm-cpp")


@pytest.mark.parametrize("std", ["c11", "c17", "gnu2x", "c++17", "c++20"])
def test_the_header_stands_alone(installed: Installation, tmp_path: Path, std: str) -> None:
    source = tmp_path / "alone.c"
    source.write_text("#include <vllm.h>\n#include <vllm.h>\n")
    language = "c++" if "+" in std else "c"
    checked(["cc", "-x", language, f"-std={std}", *STRICT, "-fsyntax-only", *installed.pkg_config("--cflags"), str(source)])


def test_the_example_in_the_manual_works(installed: Installation, model: Path, tmp_path: Path) -> None:
    text = re.search(r"as you like:\n \*\n(.*?)\n \*\n \*     cc hello", HEADER.read_text(), re.DOTALL)
    assert text is not None
    source = tmp_path / "hello.c"
    source.write_text(re.sub(r"^ \*( {5})?", "", text[1], flags=re.MULTILINE) + "\n")
    done = installed.run(installed.compile(source, "hello"), model)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("name", ["libvllm.so", "libvllm.so.0"])
def test_exports_are_the_headers(installed: Installation, name: str) -> None:
    declared = build.exports(HEADER.read_text())
    assert len(declared) == len(set(declared)) == 46
    library = str(installed.lib / name)
    rows = [line.split() for line in checked(["nm", "-D", "--defined-only", library]).stdout.splitlines()]
    assert sorted(row[2] for row in rows if row[1] != "A") == sorted(f"{function}@@VLLM_ABI_1" for function in declared)
    assert [row[2] for row in rows if row[1] == "A"] == ["VLLM_ABI_1"]
    dynamic = checked(["readelf", "-dW", library]).stdout
    assert "Library soname: [libvllm.so.0]" in dynamic
    assert "python" not in dynamic  # neither a needed library nor a run path of the machine that built it


def test_abi_equals_the_baseline(installed: Installation, tmp_path: Path) -> None:
    if shutil.which("abidiff") is None:
        assert not os.environ.get("CI"), "abidiff is missing: .ci/run has to install abigail-tools"
        pytest.fail("abidiff is missing; apt-get install abigail-tools")
    library, headers = str(installed.lib / "libvllm.so.0"), str(HEADER.parent)
    now = tmp_path / "libvllm.abi.xml"
    now.write_text(checked([*ABIDW, "--headers-dir", headers, library]).stdout)
    done = installed.run("abidiff", "--no-default-suppression", BASELINE, now)
    advice = f"if the change is meant, accept it: {' '.join(ABIDW)} --headers-dir include {library} > capi/{BASELINE.name}"
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{advice}"
    assert BASELINE.read_text().count("<elf-symbol ") == 46


def test_every_function_has_a_block_of_the_manual() -> None:
    text = HEADER.read_text()
    for name in build.exports(text):
        before = text[: re.search(rf"^VLLM_API\b[^;]*?\b{name}\(", text, re.MULTILINE).start()]
        assert before.rstrip().endswith("*/"), f"{name} has no comment above it"


def test_no_struct_is_declared_twice() -> None:
    """cffi reads the header itself, so that the bridge cannot disagree with it."""
    sources = [path.read_text() for path in C_SOURCES.glob("*.[ch]")]
    assert not [text for text in sources if re.search(r"typedef struct vllm_(?!embed)", text)]
    assert "typedef struct vllm_sampling_params" in build.type_declarations(HEADER.read_text())
