"""The pinned uv, which tests of environments drive, and sources for it to build."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
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


def write_sdist(folder: Path, name: str, texts: Mapping[str, str]) -> str:
    """A source distribution ``NAME.tar.gz``, the same bytes each time; its SHA-256."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as out:
        for path, text in texts.items():
            info = tarfile.TarInfo(f"{name}/{path}")
            info.size = len(text)
            out.addfile(info, io.BytesIO(text.encode()))
    packed = gzip.compress(data.getvalue(), mtime=0)
    (folder / f"{name}.tar.gz").write_bytes(packed)
    return hashlib.sha256(packed).hexdigest()
