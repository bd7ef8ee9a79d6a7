"""Builds libvllm: the C door, its forwarding twin, and the embedding module; and writes the files that tell compilers where they are.

Everything that can be said in pyproject.toml is said there. What is left here is C: cffi's own build helpers make plain extension
modules, not a library with a SONAME, a version script and a fixed list of exports.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from distutils.command.install_data import install_data  # setuptools' own copy; it has no other name
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import _StaticPth, editable_wheel

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "capi"))

from vllm_capi import build  # noqa: E402 - the source tree is not on the path of an isolated build

HEADER = ROOT / "include" / "vllm.h"
FLAGS = ["-std=gnu11", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-fexceptions", "-Wall", "-Wextra", "-Wno-format-truncation"]
FLAGS += [f"-ffile-prefix-map={ROOT}=."]  # the same library wherever it is built
LIBRARY_FLAGS = ["-shared", "-Wl,-soname,libvllm.so.0", f"-Wl,--version-script={build.SOURCES / 'libvllm.map'}"]
LIB = "vllm_capi/lib"


class BuildLibvllm(build_ext):
    """One extension, the embedding module, in the usual way; beside it the two plain C libraries and the files about them."""

    def run(self) -> None:
        in_source = ROOT / "capi" / LIB
        in_source.mkdir(exist_ok=True)
        super().run()
        self.build_libraries(Path(self.build_temp), in_source if self.inplace else Path(self.build_lib, LIB))

    def build_extension(self, extension: Extension) -> None:
        generated = Path(self.build_temp, "_vllm_embed.c")
        generated.parent.mkdir(parents=True, exist_ok=True)
        build.write_embedding_source(generated, HEADER.read_text())
        extension.sources = [*extension.sources, str(generated)]
        super().build_extension(extension)

    def build_libraries(self, temporary: Path, target: Path) -> None:
        compiler = self.compiler.compiler_so[0]
        defines = [f"-D{name}={value}" for name, value in build.macros(self.distribution.get_version())]
        sources = [str(build.SOURCES / name) for name in build.DOOR_SOURCES]
        includes = [f"-I{HEADER.parent}", f"-I{build.SOURCES}"]
        # An embedded Python cannot be unloaded, so nodelete; nothing stays undefined; its own names are its own, whatever the host defines.
        strict = ["-Wl,-z,defs", "-Wl,-z,nodelete", "-Wl,-Bsymbolic", "-pthread", "-ldl"]
        self.spawn([compiler, *FLAGS, *defines, *includes, *sources, *LIBRARY_FLAGS, *strict, "-o", str(target / "libvllm.so.0")])

        forwarder = temporary / "forwarder.c"
        build.write_forwarder_source(forwarder, HEADER.read_text())
        twin = ["-Wl,--filter=$ORIGIN/libvllm.so.0", "-o", str(target / "libvllm.so")]
        self.spawn([compiler, *FLAGS, str(forwarder), *LIBRARY_FLAGS, *twin])

        files = build.describe("@lib@", "@lib@/../include", self.distribution.get_version(), here="@lib@")
        for name, text in files.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.install_header(target.parent / "include" / "vllm.h")

    def install_header(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if self.inplace:
            path.symlink_to(os.path.relpath(HEADER, path.parent))  # an edit of the header must not leave a stale copy
        else:
            shutil.copyfile(HEADER, path)


class InstallData(install_data):
    """Also tells a prefix where libvllm is: <prefix>/lib/pkgconfig and <prefix>/lib/cmake are searched without being told to."""

    def run(self) -> None:
        builder = self.get_finalized_command("build_ext")
        if builder.inplace:
            package = str(ROOT / "capi" / "vllm_capi")
        else:
            package = "@lib@/" + os.path.relpath(sysconfig.get_path("platlib"), Path(sysconfig.get_path("data"), "lib")) + "/vllm_capi"
        files = build.describe(f"{package}/lib", f"{package}/include", self.distribution.get_version(), here="@lib@")
        for name, text in files.items():
            path = Path(self.install_dir, "lib", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            self.outfiles.append(str(path))


class PlainPathEditable(editable_wheel):
    """An editable install is two path entries, engine/ and capi/: no import hook, so type checkers and the embedded Python see it."""

    def _run_install(self, category: str) -> None:
        if category == "data":  # setuptools leaves data files out of an editable install
            self.run_command("install_data")
        else:
            super()._run_install(category)

    def _select_strategy(self, name: str, _tag: str, _build_lib: str) -> _StaticPth:
        return _StaticPth(self.distribution, name, [ROOT / "engine", ROOT / "capi"])


setup(
    cmdclass={"build_ext": BuildLibvllm, "editable_wheel": PlainPathEditable, "install_data": InstallData},
    ext_modules=[
        Extension(
            "vllm_capi.lib._vllm_embed",
            [str((build.SOURCES / "embed.c").relative_to(ROOT))],
            include_dirs=[str(HEADER.parent), str(build.SOURCES)],
            extra_compile_args=FLAGS,
            extra_link_args=["-Wl,-z,nodelete"],
        )
    ],
    data_files=[("lib/pkgconfig", [])],  # has no file of its own: InstallData writes them
)
