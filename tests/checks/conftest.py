"""Fixtures of the checks' tests.

The controls that need torch run on the CPU in a Debian that has it (``test_in_debian.py``). ``OCI_BUILDER_TORCH`` names a
folder of packages with torch and transformers for this Python, such as the site-packages of a built tier; then they run
here, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

# Behind this environment's own packages, so that the rest of the tests is not another's.
sys.path += filter(None, [os.environ.get("OCI_BUILDER_TORCH")])


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    """A check gives its process caches and a HOME of its own; the next test must not have them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
