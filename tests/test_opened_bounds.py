"""To open an archive keeps no more of its documents than to verify it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.verify import VerifyOptions, verify_archives
from tests.lab.archives import Lab, Members, write

MIB = 1 << 20


def padded(count: int, *, first: bool) -> Members:
    """A good image among documents of 4 MiB that nobody refers to."""
    good = Lab().oci()
    more = {f"blobs/more-{n}": json.dumps({"pad": "x" * (4 * MIB - 100 - n)}).encode() for n in range(count)}
    return more | good if first else good | more


@pytest.mark.parametrize("compress", [False, True])
def test_c10_10_documents_that_nobody_needs_are_passed_over(tmp_path: Path, compress: bool) -> None:
    """120 MiB of JSON in 30 members of the largest size: 64 MiB are kept, as verify keeps."""
    archive = write(tmp_path / "a", padded(30, first=False), compress=compress)
    unpack_image(archive, tmp_path / "out", UnpackOptions(threads=1))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a", "b"]


def test_c10_10_verify_and_unpack_stop_at_the_same_document(tmp_path: Path) -> None:
    archive = write(tmp_path / "a", padded(17, first=True))
    with pytest.raises(OciBuilderError) as error:
        unpack_image(archive, tmp_path / "out", UnpackOptions(threads=1))
    assert error.value.code in {found.code for found in verify_archives([archive], VerifyOptions(threads=1)).errors}
