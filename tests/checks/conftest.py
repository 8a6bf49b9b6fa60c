"""Fixtures of the checks' tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    """A check gives its process caches and a HOME of its own; the next test must not have them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
