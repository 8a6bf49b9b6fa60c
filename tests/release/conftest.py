"""A hub for the tests of publication."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.hub import FakeHub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as made:
        yield made
