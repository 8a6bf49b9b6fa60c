"""A spec, ready to be built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cache.lab import write_spec


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A spec of one staged tier on a root file system."""
    for name, size in (("tier/a.bin", 3 << 20), ("tier/b.txt", 5), ("root/etc/os-release", 20)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(os.urandom(size))
    write_spec(tmp_path, "spec.json")
    return tmp_path
