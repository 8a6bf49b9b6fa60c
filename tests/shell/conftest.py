"""A hub host behind a proxy, which serves the quick build's portable archive."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.shell.hub import Hub


@pytest.fixture
def hub(quick: Built, tmp_path: Path) -> Iterator[Hub]:
    if shutil.which("openssl") is None or shutil.which("curl") is None:
        pytest.skip("not installed: openssl or curl")
    (tmp_path / "tls").mkdir()
    made = Hub(quick.portable.read_bytes(), tmp_path / "tls").start()
    yield made
    made.close()
