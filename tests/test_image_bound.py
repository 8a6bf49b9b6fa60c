"""``limits.image_size``: an image of exactly so many bytes passes, one of a byte more does not, whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.model.errors import PolicyError
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.verify import VerifyOptions, verify_archives
from tests.conftest import Built


def verified(archive: Path, limits: Limits, _folder: Path) -> set[str]:
    report = verify_archives([archive], VerifyOptions(limits=limits))
    assert report.exit_status == (4 if report.findings else 0)
    return {finding.code for finding in report.findings}


def unpacked(archive: Path, limits: Limits, folder: Path) -> set[str]:
    try:
        unpack_image(archive, folder, UnpackOptions(limits=limits))
    except PolicyError as error:
        return {error.code}
    return set()


@pytest.mark.parametrize("read", [verified, unpacked])
def test_the_bound_is_the_last_size_that_is_good(
    quick: Built, tmp_path: Path, read: Callable[[Path, Limits, Path], set[str]]
) -> None:
    size = quick.container["size"]["uncompressed"]
    assert read(quick.oci, replace(DEFAULT_LIMITS, image_size=size), tmp_path / "good") == set()
    assert read(quick.oci, replace(DEFAULT_LIMITS, image_size=size - 1), tmp_path / "large") == {"limit.image"}
    assert not (tmp_path / "large").exists()
