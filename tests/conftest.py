"""Fixtures every room may use. Puts tests/ and the root on the path, so that tests import `oracle`, `reference`, `tiny_models` and
`benchmarks` by name."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import oracle

# A job started in the background has SIGINT ignored, and hands that on to every program the tests start: they test what it does otherwise.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two shared cores make any deadline a matter of luck; what a test costs shows in --durations.
hypothesis.settings.register_profile("shared-machine", deadline=None)
hypothesis.settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a recorded case's model, by the case's name; made at first use, once a session."""
    folder = tmp_path_factory.mktemp("tiny_models")

    def path_of(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else oracle.cases()[name].model().write(path)

    return path_of
