"""Files hashed in other processes: the same digests, the same refusals, and nothing lost with a process."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from oci_builder.model.errors import SpecError
from oci_builder.rootfs import scan_content, scan_helpers
from oci_builder.rootfs.scan import SourceEntry, Tree, scan_tree
from oci_builder.rootfs.scan_content import content_digests
from oci_builder.rootfs.scan_hash import Wanted, digest
from oci_builder.rootfs.scan_helpers import Helpers
from oci_builder.wire.tar import Kind

CONTENT = {b"empty": b"", b"small": b"abc", b"large": b"0123456789abcdef" * (3 << 16), b"n\xffame\n": b"x"}


@pytest.fixture
def files(tmp_path: Path) -> list[Wanted]:
    wanted: list[Wanted] = []
    for name, data in CONTENT.items():
        place = os.fsencode(tmp_path) + b"/" + name
        with open(place, "wb") as file:
            file.write(data)
        wanted.append(_wanted(place))
    return wanted


def _wanted(place: bytes) -> Wanted:
    s = os.lstat(place)
    return place, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_nlink


@pytest.mark.parametrize("count", [0, 1, 2])
def test_digests_are_those_of_the_content_wherever_they_are_made(files: list[Wanted], count: int) -> None:
    with Helpers(count) as helpers:
        assert helpers.digests(files) == [hashlib.sha256(data).digest() for data in CONTENT.values()]


@pytest.mark.parametrize("field", range(1, 6))
@pytest.mark.parametrize("count", [0, 1])
def test_a_file_that_is_not_what_the_scan_saw_has_no_digest(files: list[Wanted], field: int, count: int) -> None:
    other = list(files[1])
    other[field] += 1  # type: ignore[operator]
    with Helpers(count) as helpers:
        answer = helpers.digests([files[0], tuple(other), files[2]])  # type: ignore[list-item]
    assert [bool(one) for one in answer] == [True, False, True]


@pytest.mark.parametrize("count", [0, 1])
def test_what_cannot_be_read_has_no_digest_and_the_rest_has(files: list[Wanted], tmp_path: Path, count: int) -> None:
    gone = (os.fsencode(tmp_path) + b"/gone", *files[1][1:])
    link = os.fsencode(tmp_path) + b"/link"
    os.symlink(files[1][0], link)
    fifo = os.fsencode(tmp_path) + b"/fifo"
    os.mkfifo(fifo)
    with Helpers(count) as helpers:
        answer = helpers.digests([gone, (link, *files[1][1:]), (fifo, *files[1][1:]), files[1]])
    assert answer == [b"", b"", b"", hashlib.sha256(b"abc").digest()]


def test_a_file_that_grows_after_it_was_opened_has_no_digest(
    files: list[Wanted], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.read

    def grow(descriptor: int, size: int) -> bytes:
        with open(files[1][0], "ab") as file:
            file.write(b"more")
        monkeypatch.setattr(os, "read", read)
        return read(descriptor, size)

    monkeypatch.setattr(os, "read", grow)
    assert digest(files[1]) == b""


def test_what_a_dead_process_does_not_answer_is_hashed_here(files: list[Wanted]) -> None:
    with Helpers(1) as helpers:
        (process,) = helpers._processes
        process.kill()
        process.wait()
        for _ in range(2):
            assert helpers.digests(files) == [hashlib.sha256(data).digest() for data in CONTENT.values()]


@pytest.mark.parametrize("argv", [["/nonexistent/python"], ["true"], ["echo", "neither marshal nor digests"]])
def test_a_process_that_is_not_what_it_should_be_costs_nothing_but_time(
    files: list[Wanted], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setattr(scan_helpers, "_ARGV", argv)
    with Helpers(2) as helpers:
        assert helpers.digests(files) == [hashlib.sha256(data).digest() for data in CONTENT.values()]


def test_no_process_stays(files: list[Wanted]) -> None:
    with Helpers(2) as helpers:
        processes = list(helpers._processes)
        helpers.digests(files)
    assert len(processes) == 2
    assert all(process.returncode is not None for process in processes)


def _two_trees(tmp_path: Path) -> list[Tree]:
    trees = []
    for name in ("one", "two"):
        root = tmp_path / name
        root.mkdir()
        for number in range(40):
            (root / f"f{number}").write_bytes(b"%d" % (number // 2 if name == "one" else number) + bytes(number % 3))
        trees.append(scan_tree(root))
    return trees


def test_a_build_of_many_files_learns_the_same_from_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = _two_trees(tmp_path)
    here = content_digests(trees, threads=2)
    monkeypatch.setattr(scan_content, "_MANY", 1)
    monkeypatch.setattr(scan_content, "_BATCH", 7)
    monkeypatch.setattr(scan_helpers.scan_hash, "digest", _not_here)
    assert content_digests(trees, threads=2) == here != {}


def test_a_file_that_changed_is_named_though_another_process_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8-13."""
    trees = _two_trees(tmp_path)
    victim = next(e for e in trees[1].entries if e.kind is Kind.FILE and e.path == b"f9")
    _replace(trees[1], victim)
    monkeypatch.setattr(scan_content, "_MANY", 1)
    with pytest.raises(SpecError, match="f9") as caught:
        content_digests(trees, threads=2)
    assert caught.value.code == "scan.changed"


def _replace(tree: Tree, entry: SourceEntry) -> None:
    place = tree.root / os.fsdecode(entry.path)
    data = place.read_bytes()
    (tree.root / "new").write_bytes(data)
    os.replace(tree.root / "new", place)


def _not_here(_: Wanted) -> bytes:
    raise AssertionError("hashed in this process")
