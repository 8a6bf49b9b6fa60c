"""Archives are written wherever they must lie: the kernel's copy is a short cut, and gives the slow way's bytes."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.model.errors import TransportError
from oci_builder.transports.filewriter import FileWriter
from oci_builder.wire.source import FileRange
from tests.conftest import Built

SIZE = (9 << 20) + 12345


@pytest.fixture
def source(tmp_path: Path) -> Iterator[FileRange]:
    (tmp_path / "blob").write_bytes(os.urandom(SIZE))
    fd = os.open(tmp_path / "blob", os.O_RDONLY)
    yield FileRange(fd, 0, SIZE)
    os.close(fd)


def written(source: FileRange, path: Path) -> bytes:
    with FileWriter(path) as out:
        out.write(b"head")
        out.copy(source, 100, SIZE - 200)
        record = out.close()
    assert record.size == SIZE - 196
    return path.read_bytes()


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM])
def test_without_the_kernels_copy_the_bytes_are_the_same(
    source: FileRange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    quick = written(source, tmp_path / "quick")

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert written(source, tmp_path / "slow") == quick


def test_a_kernel_that_copies_nothing_is_not_the_end(
    source: FileRange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = written(source, tmp_path / "quick")
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    assert written(source, tmp_path / "slow") == quick


def test_a_failing_disk_is_said_and_leaves_nothing(
    source: FileRange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "copy_file_range", fail)
    with pytest.raises(TransportError) as caught:
        written(source, tmp_path / "out")
    assert caught.value.code == "io.error"
    assert [p.name for p in tmp_path.iterdir()] == ["blob"]


def test_cache_and_output_on_two_file_systems(quick: Built) -> None:
    """/dev/shm is another file system than the tests' folder on every Linux."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == quick.out.stat().st_dev:
            pytest.skip("/dev/shm is no file system of its own")
        shutil.copytree(quick.cache, f"{other}/cache")
        for out, cache in ((Path(other, "out"), quick.cache), (quick.out.with_name("out2"), Path(other, "cache"))):
            build(quick.spec, out, BuildOptions(cache, 2))
            for name in ("runtime.oci.tar", "runtime.docker.tar.gz", "runtime.tar.gz"):
                assert (out / name).read_bytes() == (quick.out / name).read_bytes()
