"""What is no tar at all is called by its name."""

from __future__ import annotations

import bz2
import lzma
import os
from collections.abc import Callable

import pytest

from oci_builder.model.errors import FormatError
from oci_builder.wire.tar import TarReader
from tests.lab import tarlang as t

PACKERS: dict[str, Callable[[bytes], bytes]] = {"xz": lzma.compress, "bzip2": bz2.compress}


@pytest.mark.parametrize("name", PACKERS)
def test_a_compression_that_is_not_read_is_named(name: str) -> None:
    with pytest.raises(FormatError, match=f"these are {name} data: decompress them first") as error:
        list(TarReader([PACKERS[name](t.tar(t.file(b"f", os.urandom(2000))))]))
    assert error.value.code == "tar.checksum"


@pytest.mark.parametrize("name", [b"BZh9", b"\xfd7zXZ"])
def test_a_tar_whose_first_name_looks_like_one_is_read(name: bytes) -> None:
    assert [entry.name for entry in TarReader([t.tar(t.file(name, b"x"))])] == [name]
