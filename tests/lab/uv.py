"""The pinned uv, which tests of environments drive."""

from __future__ import annotations

from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError
from oci_builder.payload.uv import UV_VERSION, find_uv


def require_uv() -> None:
    """Skip the test, or the whole file that calls this at its top, where there is no uv of that version."""
    try:
        find_uv(Path("/nonexistent"))
    except OciBuilderError as error:
        pytest.skip(f"needs uv {UV_VERSION}: {error.message}", allow_module_level=True)
