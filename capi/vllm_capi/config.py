"""`vllm-config`: where the installed libvllm is, and how to compile and link with it.

Owns the command line of vllm-config and the paths inside the installed package. Must not start the engine: it answers in milliseconds.
"""

from __future__ import annotations

import argparse
import shlex
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LIB_DIR = PACKAGE / "lib"
INCLUDE_DIR = PACKAGE / "include"

ANSWERS = {
    "cflags": ("compiler flags", lambda: f"-I{shlex.quote(str(INCLUDE_DIR))}"),
    "libs": ("linker flags, with the run path", lambda: " ".join(shlex.quote(flag) for flag in link_flags())),
    "libdir": ("directory of libvllm.so", lambda: str(LIB_DIR)),
    "includedir": ("directory of vllm.h", lambda: str(INCLUDE_DIR)),
    "pkgconfigdir": ("directory of vllm.pc, for PKG_CONFIG_PATH", lambda: str(LIB_DIR / "pkgconfig")),
    "cmakedir": ("directory of vllmConfig.cmake, for vllm_DIR", lambda: str(LIB_DIR / "cmake" / "vllm")),
    "version": ("version of the library", lambda: metadata.version("vllm-cpp")),
}


def link_flags() -> list[str]:
    return [f"-L{LIB_DIR}", f"-Wl,-rpath,{LIB_DIR}", "-lvllm"]


def main(arguments: list[str] | None = None) -> int:
    """Prints the answers asked for, in the order of the list above, on one line."""
    parser = argparse.ArgumentParser(prog="vllm-config", description="Tells how to build programs with libvllm.")
    for name, (meaning, _) in ANSWERS.items():
        parser.add_argument(f"--{name}", action="store_true", help=meaning)
    chosen = parser.parse_args(arguments)
    asked = [name for name in ANSWERS if getattr(chosen, name)]
    if not asked:
        parser.error("nothing asked; expected one or more of " + " ".join(f"--{name}" for name in ANSWERS))
    print(" ".join(ANSWERS[name][1]() for name in asked))
    return 0
