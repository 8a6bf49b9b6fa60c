"""A hub and a recorded build for the tests of publication."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.hub import FakeHub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as made:
        yield made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One recorded build for all tests of a file, which work on copies."""
    from tests.release.built import make_release  # needs a package that not all tests here need

    place = tmp_path_factory.mktemp("made")
    make_release(place)
    return place
