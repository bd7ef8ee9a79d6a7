"""Which source files a kernel is made from, as one hash.

Owns the walk over import statements: a kernel's code can come only from its own file and from what that imports, and numba's cache does not
notice an edit there. Must not know compilers or caches.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from functools import cache
from pathlib import Path

PACKAGE = "vllm_cpp"
_ROOT = Path(__file__).resolve().parent.parent
_STARTED = time.time()
# These speak and never compute, the package's own file only gathers: an edit in one of them changes no kernel.
_WITHOUT_CODE = {PACKAGE} | {f"{PACKAGE}.{name}" for name in ("env", "log", "errors")}
_IMPORT = re.compile(rf"^[ \t]*(?:from[ \t]+({PACKAGE}[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))$", re.MULTILINE)
_NAME = re.compile(r"[\w.]+")


def _file(module: str) -> Path | None:
    place = _ROOT.joinpath(*module.split(".")[1:])
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@cache
def _content(module: str) -> tuple[bytes, frozenset[str]]:
    """A module's text, and the modules of this package it names in import statements."""
    path = _file(module)
    if path is None:
        return b"", frozenset()
    text = path.read_bytes()
    named: set[str] = set()
    for source, names, plain in _IMPORT.findall(text.decode()):
        if source:
            named |= {source} | {f"{source}.{name}" for name in _NAME.findall(names)}
        else:
            named |= {name for name in _NAME.findall(plain) if name.split(".")[0] == PACKAGE}
    return text, frozenset(name for name in named - _WITHOUT_CODE if _file(name) is not None)


@cache
def modules_behind(module: str) -> tuple[str, ...]:
    """The module and all that it imports from this package, by itself or through others; sorted."""
    found, new = set(), {module}
    while new:
        name = new.pop()
        found.add(name)
        new |= _content(name)[1] - found
    return tuple(sorted(found))


@cache
def hash_of(module: str) -> str:
    """Hash of every source that code in `module` can come from; one outside this package (a test's) could use any kernel source."""
    digest = hashlib.sha256()
    if module.split(".", maxsplit=1)[0] == PACKAGE:
        names = modules_behind(module)
    else:
        names = tuple(_named(path) for path in sorted((_ROOT / "kernels").rglob("*.py")))
        digest.update(Path(str(sys.modules[module].__file__)).read_bytes())
    for name in names:
        digest.update(name.encode() + b"\0" + _content(name)[0])
        path = _file(name)
        if path is not None and path.stat().st_mtime > _STARTED:
            # Edited since: the text read now may not be what was imported, so what is compiled from it is kept for nobody.
            digest.update(os.urandom(8))
    return digest.hexdigest()[:16]


def _named(path: Path) -> str:
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return ".".join((PACKAGE, *parts[: -1 if parts[-1] == "__init__" else None]))
