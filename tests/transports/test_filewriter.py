"""Archives are what was appended to them, whole on the disk, wherever they must lie."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.model.digest import Digest
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


def expected(source: FileRange) -> bytes:
    """The slow way: read everything, and slice."""
    return b"head" + os.pread(source.fd, SIZE, 0)[100 : SIZE - 100]


def test_the_archive_is_what_was_appended_and_so_is_its_digest(source: FileRange, tmp_path: Path) -> None:
    with FileWriter(tmp_path / "out") as out:
        for _ in range(3):
            out.write(b"head")
            out.copy(source, 100, SIZE - 200)
        out.write(b"")
        out.copy(FileRange(source.fd, 7, 20), 5)
        out.copy(source, 5, 0)
        record = out.close()
    data = expected(source) * 3 + os.pread(source.fd, 15, 12)
    assert (tmp_path / "out").read_bytes() == data
    assert (record.sha256, record.size) == (Digest.of(data), len(data))


def test_reads_and_writes_that_do_less_than_asked_give_the_same_bytes(
    source: FileRange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.preadv, os.write
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:300_001]], at))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:100_003]))
    assert written(source, tmp_path / "out") == expected(source)


@pytest.mark.parametrize("refused", ["open", "write"])
def test_where_the_page_cache_cannot_be_passed_by_the_bytes_are_the_same(
    source: FileRange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real_open, real_write = os.open, os.write

    def open_(path: object, flags: int, *rest: int) -> int:
        if refused == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no such flag here")
        return real_open(path, flags, *rest)  # type: ignore[call-overload, no-any-return]

    def write(fd: int, data: memoryview) -> int:
        if refused == "write" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not these multiples")
        return real_write(fd, data)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "write", write)
    assert written(source, tmp_path / "out") == expected(source)


def test_an_archive_is_on_the_disk_before_it_has_its_name(
    source: FileRange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves is the whole archive or none."""
    steps: list[str] = []
    sync, replace = os.fdatasync, os.replace
    monkeypatch.setattr(os, "fdatasync", lambda fd: (steps.append(f"sync {os.fstat(fd).st_size}"), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("rename"), replace(a, b)))
    written(source, tmp_path / "out")
    assert steps == [f"sync {SIZE - 196}", "rename"]


@pytest.mark.parametrize("call", ["preadv", "write", "fdatasync"])
def test_a_failing_disk_is_said_and_leaves_nothing(
    source: FileRange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(TransportError) as caught:
        written(source, tmp_path / "out")
    assert caught.value.code == "io.error"
    assert str(tmp_path) in caught.value.message
    assert [p.name for p in tmp_path.iterdir()] == ["blob"]


def test_a_blob_that_ends_early_is_an_error(source: FileRange, tmp_path: Path) -> None:
    with pytest.raises(TransportError) as caught, FileWriter(tmp_path / "out") as out:
        out.copy(FileRange(source.fd, 0, SIZE + 1))
    assert caught.value.code == "io.error"
    assert str(tmp_path) in caught.value.message
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
