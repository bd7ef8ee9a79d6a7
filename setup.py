"""Builds what pyproject.toml cannot describe."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import _StaticPth, editable_wheel

ROOT = Path(__file__).resolve().parent


class PlainPathEditable(editable_wheel):
    """An editable install is two path entries, engine/ and capi/: no import hook, so type checkers and the embedded Python see it."""

    def _select_strategy(self, name: str, _tag: str, _build_lib: str) -> _StaticPth:
        return _StaticPth(self.distribution, name, [ROOT / "engine", ROOT / "capi"])


setup(cmdclass={"editable_wheel": PlainPathEditable})
