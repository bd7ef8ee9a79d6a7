"""The installation: found by pkg-config, CMake and vllm-config, under both names of the library, from a wheel and in place."""

from __future__ import annotations

import itertools
import re
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from clibrary import PROGRAMS, ROOT, Installation, checked, install

ONE, TWO = "libvllm.so", "libvllm.so.0"


def test_the_wheel_holds_the_library_and_no_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
        names = {entry.filename for entry in entries}
        assert not [entry.filename for entry in entries if (entry.external_attr >> 28) == 0o12]
        tags = archive.read(next(name for name in names if name.endswith(".dist-info/WHEEL"))).decode()
    for wanted in ("lib/libvllm.so", "lib/libvllm.so.0", "include/vllm.h", "lib/pkgconfig/vllm.pc", "lib/cmake/vllm/vllmConfig.cmake"):
        assert f"vllm_capi/{wanted}" in names
    assert "vllm_cpp/py.typed" in names
    assert not [name for name in names if name.endswith((".c", ".in", ".map"))]
    assert f"Tag: cp{sys.version_info.major}{sys.version_info.minor}-cp" in tags


def test_every_need_has_an_upper_bound() -> None:
    """Or a release of somebody else's breaks an installation of this one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = (
        project["build-system"]["requires"],
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
    )
    needs = list(itertools.chain(*groups))
    assert len(needs) > 15
    assert [need for need in needs if "<" not in need] == []


def test_vllm_config_answers(installed: Installation) -> None:
    lib = installed.lib
    assert installed.config("--libs") == f"-L{lib} -Wl,-rpath,{lib} -lvllm"
    assert installed.config("--cflags") == f"-I{installed.config('--includedir')}"
    assert installed.config("--cflags", "--libs") == f"{installed.config('--cflags')} {installed.config('--libs')}"
    assert Path(installed.config("--includedir"), "vllm.h").read_text() == (ROOT / "include" / "vllm.h").read_text()
    assert Path(installed.config("--pkgconfigdir"), "vllm.pc").is_file()
    assert Path(installed.config("--cmakedir"), "vllmConfig.cmake").is_file()
    assert installed.config("--version") == metadata.version("vllm-cpp")
    for arguments in ((), ("--nonsense",)):
        done = installed.run(installed.prefix / "bin" / "vllm-config", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--pkgconfigdir" in done.stderr


@pytest.mark.parametrize("place", ["package", "prefix"])
def test_pkg_config(installed: Installation, program: Callable[[str], Path], place: str) -> None:
    """By the directory that vllm-config names, and by the one that every pkg-config of that prefix searches."""
    directory = installed.config("--pkgconfigdir") if place == "package" else str(installed.prefix / "lib" / "pkgconfig")
    environment = {**installed.environment, "PKG_CONFIG_PATH": directory}
    flags = checked(["pkg-config", "--cflags", "--libs", "vllm"], env=environment, cwd="/").stdout.split()
    built = installed.build / f"values-{place}"
    checked(["cc", str(PROGRAMS / "values.c"), *flags, "-o", str(built)], cwd="/")
    assert installed.run(built, cwd="/").returncode == 0
    assert checked(["pkg-config", "--modversion", "vllm"], env=environment).stdout.strip() == metadata.version("vllm-cpp")


@pytest.mark.parametrize("target", ["vllm::vllm", "vllm::shared"])
def test_cmake(installed: Installation, tmp_path: Path, target: str) -> None:
    version = metadata.version("vllm-cpp")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(client C)\n"
        f"find_package(vllm {version} REQUIRED)\n"
        f"add_executable(client {PROGRAMS / 'values.c'})\ntarget_link_libraries(client PRIVATE {target})\n"
    )
    environment = {**installed.environment, "PKG_CONFIG_PATH": ""}
    where = f"-DCMAKE_PREFIX_PATH={installed.prefix}" if target == "vllm::vllm" else f"-Dvllm_DIR={installed.config('--cmakedir')}"
    checked(["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build"), where], env=environment)
    checked(["cmake", "--build", str(tmp_path / "build")], env=environment)
    assert installed.run(tmp_path / "build" / "client").returncode == 0


def test_cmake_refuses_another_version(installed: Installation, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.16)\nproject(client C)\nfind_package(vllm 9.1 REQUIRED)\n")
    done = installed.run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={installed.prefix}")
    assert done.returncode != 0
    assert "version: " + metadata.version("vllm-cpp") in done.stderr


def test_a_linked_program_needs_the_soname(program: Callable[[str], Path]) -> None:
    needed = re.findall(r"NEEDED.*\[(.*)\]", checked(["readelf", "-d", str(program("values"))]).stdout)
    assert "libvllm.so.0" in needed
    assert "libvllm.so" not in needed


@pytest.mark.parametrize("linked", ["loaded", "linked"])
def test_both_names_are_one_library(installed: Installation, linked: str) -> None:
    if linked == "linked":
        names = installed.compile(PROGRAMS / "names.c", "names-linked", "-DLINKED")
    else:
        names = installed.compile(PROGRAMS / "names.c", "names", flags="--cflags")
    lib = installed.lib
    by_path = [[str(lib / name) for name in order] for order in ((ONE, TWO), (TWO, ONE), (ONE, ONE), (TWO,))]
    for order, scope in itertools.product(by_path, ([], ["global"])):
        done = installed.run(names, *scope, *order)
        assert done.returncode == 0, (order, scope, done.stderr)
    by_name = {**installed.environment, "LD_LIBRARY_PATH": str(lib)}
    for order in ((ONE, TWO), (TWO, ONE), (ONE, lib / TWO, lib / ONE, TWO)):
        done = installed.run(names, *order, env=by_name)
        assert done.returncode == 0, (order, done.stderr)


def test_links_to_the_library_lead_to_the_same_installation(installed: Installation, tmp_path: Path, model: Path) -> None:
    """As a distribution or an administrator would make them in /usr/local/lib."""
    for name in (ONE, TWO):
        (tmp_path / name).symlink_to(installed.lib / name)
    dlopen = installed.compile(ROOT / "examples_c" / "dlopen.c", "dlopen-links", flags="--cflags")
    done = installed.run(dlopen, model, tmp_path / ONE, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "interface 21 says:" in done.stdout


def test_editable_install_is_found_too(tmp_path: Path, source: Path, model: Path) -> None:
    """The tree itself, built in place: the same questions, answered with paths of the tree."""
    tree, prefix = tmp_path / "tree", tmp_path / "prefix"
    checked(["cp", "-r", str(source), str(tree)])
    install(prefix, "--no-build-isolation", "-e", str(tree))
    installation = Installation(prefix, tmp_path)
    assert installation.lib == tree / "capi" / "vllm_capi" / "lib"
    assert (tree / "capi" / "vllm_capi" / "include" / "vllm.h").resolve() == tree / "include" / "vllm.h"
    entries = {line for path in prefix.glob("lib/python*/site-packages/__editable__*.pth") for line in path.read_text().split()}
    assert entries == {str(tree / "engine"), str(tree / "capi")}
    environment = {**installation.environment, "PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    flags = checked(["pkg-config", "--cflags", "--libs", "vllm"], env=environment).stdout.split()
    checked(["cc", str(ROOT / "examples_c" / "complete.c"), *flags, "-o", str(tmp_path / "complete")])
    done = installation.run(tmp_path / "complete", model, env={}, cwd="/")
    assert done.returncode == 0, done.stderr
