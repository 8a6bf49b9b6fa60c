"""The folder store against the suite, with its working files inside and beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oci_builder.store.blobs import DirStore
from tests.conformance.store import CASES, Opener


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("beside", [False, True])
def test_dir_store(tmp_path: Path, case: Callable[[Opener], None], beside: bool) -> None:
    case(lambda: DirStore(tmp_path / "store", tmp_path / "work" if beside else None))
    if beside:
        assert [p.name for p in (tmp_path / "store").iterdir()] == ["blobs"]
