"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from vocabularies import Vocabularies


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Vocabularies:
    """The recorded vocabularies, unpacked at first use."""
    return Vocabularies(tmp_path_factory.mktemp("vocabularies"))
