"""What the build of libvllm writes: the cffi source of the embedding module, the forwarding library, pkg-config and CMake files.

Owns every text derived from include/vllm.h and the C sources, so that the header stays the one place where the interface is declared.
Must not compile anything (setup.py does) nor import the engine.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "c"
TEMPLATES = HERE / "templates"
DOOR_SOURCES = ("error.c", "values.c", "mux.c", "absent.c", "surface.c", "start.c", "counts.c")

# Runs inside the new interpreter. cffi prints what this raises and then answers calls with zero, so it raises nothing.
INIT_CODE = """
from _vllm_embed import ffi, lib
try:
    from vllm_capi.bridge import bind
    bind(ffi, lib)
except BaseException as error:
    text = f"cannot start the bridge: {type(error).__name__}: {error}"
    lib.vllmpy_start_failed(text.encode("utf-8", "replace"))
"""

PREAMBLE = """
#include "door.h"
#include "back.h"
static int cffi_start_python(void);
int vllmpy_start_cffi(void);
int vllmpy_start_cffi(void) { return cffi_start_python(); }
"""


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def exports(header: str) -> list[str]:
    """The functions that the header declares, in its order."""
    return re.findall(r"^VLLM_API\b[^;]*?\b(vllm_\w+)\(", without_comments(header), flags=re.MULTILINE)


def type_declarations(header: str) -> str:
    """The header as cffi reads it: types only, since the bridge implements calls.h and calls nothing of the header."""
    text = without_comments(header)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^VLLM_API\b[^;]*;", "", text, flags=re.MULTILINE)
    text = text.replace('extern "C" {', "", 1)
    return re.sub(r"^}\s*$", "", text, flags=re.MULTILINE)


def write_embedding_source(path: Path, header: str) -> None:
    """The C source of _vllm_embed, as cffi writes it."""
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(type_declarations(header))
    ffi.cdef(without_comments((SOURCES / "back.h").read_text()))
    ffi.embedding_api(without_comments((SOURCES / "calls.h").read_text()))
    ffi.set_source("_vllm_embed", PREAMBLE)
    ffi.embedding_init_code(INIT_CODE)
    ffi.emit_c_code(str(path))


def write_forwarder_source(path: Path, header: str) -> None:
    """The C source of libvllm.so, which only names the functions.

    A wheel holds no links, and two copies of a library would be two libraries. So libvllm.so is an ELF filter (DT_FILTER): the dynamic
    linker loads libvllm.so.0 beside it and takes every symbol from there, while `-lvllm` finds the names and the SONAME in it. Its own
    definitions are never called.
    """
    lines = ["/* Written by the build: names only, for the dynamic linker takes the functions from libvllm.so.0. */"]
    visible = '__attribute__((visibility("default")))'
    lines += [f"{visible} void {name}(void) {{ __builtin_trap(); }}" for name in exports(header)]
    path.write_text("\n".join(lines) + "\n")


def libpython() -> tuple[str, str]:
    """The name of this interpreter's shared library, and its path or "" when it is not where anybody keeps it.

    sysconfig alone is not to be believed: conda says there is none and has one, relocated interpreters name a directory of their builder.
    """
    variable = sysconfig.get_config_var
    name = f"libpython{variable('LDVERSION') or variable('py_version_short')}.so.1.0"
    for directory in (variable("LIBDIR"), f"{variable('LIBDIR')}/{variable('MULTIARCH')}", f"{sys.base_prefix}/lib"):
        if directory and Path(directory, name).exists():
            return name, str(Path(directory, name))
    return name, ""


def macros(version: str) -> list[tuple[str, str]]:
    """What the door is told about its build, as C string macros."""
    name, path = libpython()
    values = {
        "DOOR_VERSION": version,
        "DOOR_PYTHON": sysconfig.get_config_var("py_version_short"),
        "DOOR_EMBED": "_vllm_embed" + sysconfig.get_config_var("EXT_SUFFIX"),
        "DOOR_BUILD_PYTHON": sys.executable,
        "DOOR_BUILD_BASE": str(Path(sys._base_executable).parent),
        "DOOR_MULTIARCH": sysconfig.get_config_var("MULTIARCH") or "",
        "DOOR_LIBPYTHON": name,
        "DOOR_BUILD_LIBPYTHON": path,
    }
    return [(key, '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"') for key, value in values.items()]


def render(template: str, **values: str) -> str:
    """A template with every @NAME@ replaced; a name without a value is an error."""
    text = (TEMPLATES / template).read_text()
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)


def describe(lib_dir: str, include_dir: str, version: str, here: str) -> dict[str, str]:
    """The pkg-config and CMake files for a library at `lib_dir`, by their names below a lib directory.

    `here` is how such a file spells its own directory, with which `lib_dir` and `include_dir` may begin when they are relative.
    """
    spell = {"vllm.pc": "${pcfiledir}", "vllmConfig.cmake": "${CMAKE_CURRENT_LIST_DIR}", "vllmConfigVersion.cmake": ""}
    places = {"vllm.pc": "pkgconfig", "vllmConfig.cmake": "cmake/vllm", "vllmConfigVersion.cmake": "cmake/vllm"}
    files = {}
    for name, place in places.items():
        up = "/".join([spell[name]] + [".."] * len(Path(place).parts))
        files[f"{place}/{name}"] = render(
            f"{name}.in", LIBDIR=lib_dir.replace(here, up), INCLUDEDIR=include_dir.replace(here, up), VERSION=version
        )
    return files
