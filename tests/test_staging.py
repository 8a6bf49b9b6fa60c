"""Staged trees are used again only while their content and the archive are what they were."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from oci_builder.execution import hashes
from oci_builder.execution.hashes import file_sha256
from oci_builder.execution.staging import Staged, Unpacked, remove_staged, stage, staged_trees
from oci_builder.model.digest import Digest
from oci_builder.model.errors import FormatError, IntegrityError, SpecError, TransportError
from tests.chroot.lab import mount, umount

CONFIG = json.dumps(
    {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}, "config": {"Env": ["A=1"]}}
).encode()


class Unpacker:
    """Fills a tree with two files and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, source: Path, folder: Path) -> Unpacked:
        assert list(folder.iterdir()) == []
        self.calls += 1
        (folder / "bin").mkdir()
        (folder / "bin/tool").write_bytes(source.read_bytes() if source.is_file() else b"layout")
        (folder / "link").symlink_to("/etc/passwd")
        return Unpacked(Digest.of(b"manifest"), CONFIG)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "image.tar"
    path.write_bytes(b"archive")
    return path


@pytest.fixture
def unpack() -> Unpacker:
    return Unpacker()


def staged(archive: Path, tmp_path: Path, unpack: Unpacker, **options: object) -> Staged:
    return stage(archive, tmp_path / "cache", unpack, **options)  # type: ignore[arg-type]


def test_a_second_time_reuses_the_tree(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    first = staged(archive, tmp_path, unpack)
    second = staged(archive, tmp_path, unpack)
    assert (first.reused, second.reused, unpack.calls) == (False, True, 1)
    assert (second.root, second.config, second.sha256) == (first.root, {"Env": ["A=1"]}, first.sha256)
    assert second.config_digest == Digest.of(CONFIG)


@pytest.mark.parametrize(
    "touch",
    [
        lambda root: (root / "bin/tool").write_bytes(b"changed"),
        lambda root: (root / "bin/new").write_bytes(b""),
        lambda root: (root / "link").unlink(),
        lambda root: (root / "bin/tool").chmod(0o700),
    ],
)
def test_a_touched_tree_is_unpacked_again(touch: object, archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    touch(staged(archive, tmp_path, unpack).root)  # type: ignore[operator]
    again = staged(archive, tmp_path, unpack)
    assert (again.reused, unpack.calls) == (False, 2)
    assert (again.root / "bin/tool").read_bytes() == b"archive"


def test_the_same_content_written_back_with_its_times_is_still_seen(
    archive: Path, tmp_path: Path, unpack: Unpacker
) -> None:
    tool = staged(archive, tmp_path, unpack).root / "bin/tool"
    times = tool.stat()
    tool.write_bytes(b"Archive")
    os.utime(tool, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not staged(archive, tmp_path, unpack).reused


def test_a_changed_archive_has_a_tree_of_its_own(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    first = staged(archive, tmp_path, unpack)
    time.sleep(0.02)
    archive.write_bytes(b"ARCHIVE")
    second = staged(archive, tmp_path, unpack)
    assert first.root != second.root
    assert (second.root / "bin/tool").read_bytes() == b"ARCHIVE"


def test_an_archive_that_changes_meanwhile(archive: Path, tmp_path: Path) -> None:
    def meddle(source: Path, folder: Path) -> Unpacked:
        source.write_bytes(b"other")
        return Unpacked(Digest.of(b""), CONFIG)

    with pytest.raises(IntegrityError) as caught:
        stage(archive, tmp_path / "cache", meddle)
    assert caught.value.code == "archive.changed"
    assert not list((tmp_path / "cache").glob("*/rootfs"))


def test_a_failed_unpack_leaves_nothing(archive: Path, tmp_path: Path) -> None:
    def fail(_source: Path, folder: Path) -> Unpacked:
        (folder / "half").write_text("half")
        raise FormatError("tar.truncated", "no more bytes")

    with pytest.raises(FormatError):
        stage(archive, tmp_path / "cache", fail)
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_too_little_space_is_said_before_anything_is_written(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    with pytest.raises(TransportError) as caught:
        staged(archive, tmp_path, unpack, needed=1 << 60)
    assert (caught.value.code, unpack.calls) == ("io.space", 0)


def write_record(archive: Path, sha256: str, size: object) -> None:
    """The record that a build leaves beside its archives."""
    record = {"archives": {archive.name: {"sha256": sha256}}, "size": {"uncompressed": size}}
    (archive.parent / "container.json").write_text(json.dumps(record))


def test_the_builds_record_says_how_much_space_it_takes(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    write_record(archive, hashlib.sha256(b"archive").hexdigest(), 1 << 60)
    with pytest.raises(TransportError) as caught:
        staged(archive, tmp_path, unpack)
    assert (caught.value.code, unpack.calls) == ("io.space", 0)


@pytest.mark.parametrize(("sha256", "size"), [("00" * 32, 1 << 60), (None, -1), (None, "much"), (None, True)])
def test_a_record_of_another_archive_is_not_asked(
    archive: Path, tmp_path: Path, unpack: Unpacker, sha256: str | None, size: object
) -> None:
    write_record(archive, sha256 or hashlib.sha256(b"archive").hexdigest(), size)
    assert not staged(archive, tmp_path, unpack).reused


def test_a_pipe_is_no_archive(tmp_path: Path, unpack: Unpacker) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError) as caught:
        staged(tmp_path / "pipe", tmp_path, unpack)
    assert caught.value.code == "spec.path"


def test_a_plain_folder_is_used_as_it_stands(tmp_path: Path, unpack: Unpacker) -> None:
    (tmp_path / "tree").mkdir()
    found = staged(tmp_path / "tree", tmp_path, unpack)
    assert (found.root, found.config, unpack.calls) == (tmp_path / "tree", {}, 0)


def test_a_layout_folder_is_unpacked(tmp_path: Path, unpack: Unpacker) -> None:
    layout = tmp_path / "layout"
    layout.mkdir()
    (layout / "index.json").write_text("{}")
    (layout / "oci-layout").write_text("{}")
    assert staged(layout, tmp_path, unpack).root != layout
    assert staged(layout, tmp_path, unpack).reused


def test_no_such_archive(tmp_path: Path, unpack: Unpacker) -> None:
    with pytest.raises(SpecError) as caught:
        staged(tmp_path / "none", tmp_path, unpack)
    assert caught.value.code == "spec.path"


def test_another_platform_is_another_tree(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    first = staged(archive, tmp_path, unpack)
    assert staged(archive, tmp_path, unpack, which=("linux/arm64",)).root != first.root


def test_a_torn_record_is_not_believed(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    first = staged(archive, tmp_path, unpack)
    record = first.root.parent / "staged.json"
    record.write_bytes(record.read_bytes()[:-9])
    assert not staged(archive, tmp_path, unpack).reused


def test_two_at_once_unpack_once(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    threads = [threading.Thread(target=staged, args=(archive, tmp_path, unpack)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert unpack.calls == 1


def test_the_hash_is_remembered_by_identity(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = file_sha256(archive, tmp_path)
    monkeypatch.setattr(hashes.hashlib, "sha256", _broken_after(1))
    assert file_sha256(archive, tmp_path) == value


def _broken_after(calls: int) -> object:
    """A sha256 that may be called for the record's name, and not for the content."""
    real, left = hashes.hashlib.sha256, [calls]

    def sha256(*args: bytes) -> object:
        left[0] -= 1
        assert left[0] >= 0, "the content was hashed again"
        return real(*args)

    return sha256


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_tree_with_something_mounted_in_it_is_not_removed(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    """B199."""
    root = staged(archive, tmp_path, unpack).root
    (root / "dev").mkdir()
    mount("/dev", str(root / "dev"), flags=4096)
    try:
        with pytest.raises(TransportError) as caught:
            staged(archive, tmp_path, unpack)
        assert (root / "dev/null").is_char_device()
    finally:
        umount(str(root / "dev"))
    assert caught.value.code == "io.busy"
    shutil.rmtree(root.parent)


def test_a_tree_in_use_is_not_removed(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    """Two runs on one tree, one of which finds it changed: programs still run in the other's."""
    with staged(archive, tmp_path, unpack) as first:
        (first.root / "bin/tool").write_bytes(b"changed")
        with staged(archive, tmp_path, unpack) as second:
            assert second.root != first.root and not second.reused
            assert (first.root / "bin/tool").read_bytes() == b"changed"
        assert staged(archive, tmp_path, unpack).root == second.root
    again = staged(archive, tmp_path, unpack)
    assert (again.root, again.reused) == (first.root, False)


def test_a_fit_tree_is_shared_by_those_who_use_it(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    with staged(archive, tmp_path, unpack) as first, staged(archive, tmp_path, unpack) as second:
        assert (second.root, second.reused) == (first.root, True)


def test_only_trees_that_nobody_uses_can_be_removed(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    cache = tmp_path / "cache"
    with staged(archive, tmp_path, unpack) as first, staged(archive, tmp_path, unpack):
        (tree,) = staged_trees(cache)
        assert not remove_staged(tree) and first.root.is_dir()
    assert remove_staged(tree) and remove_staged(tree)
    assert list(staged_trees(cache)) == [] and not first.root.exists()


def test_a_tree_is_not_removed_while_it_is_staged(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    cache, seen = tmp_path / "cache", []

    def slow(source: Path, folder: Path) -> Unpacked:
        seen.extend((tree.folder.name, remove_staged(tree)) for tree in staged_trees(cache))
        return unpack(source, folder)

    with stage(archive, cache, slow) as made:
        assert made.root.is_dir()
    assert [removed for _, removed in seen] == [False] and seen[0][0].endswith(".partial")


def test_half_a_tree_of_a_dead_run_can_be_removed(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    cache = tmp_path / "cache"
    staged(archive, tmp_path, unpack)
    (whole,) = staged_trees(cache)
    whole.folder.rename(whole.folder.with_name(whole.folder.name + ".partial"))
    (half,) = staged_trees(cache)
    assert remove_staged(half) and list(staged_trees(cache)) == []


def test_only_what_was_staged_counts_as_a_tree(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    cache = tmp_path / "cache"
    staged(archive, tmp_path, unpack)
    (tree,) = staged_trees(cache)
    (cache / "mine").mkdir()
    (cache / ("0" * 32)).symlink_to(tree.folder)
    (cache / ("1" * 32)).write_bytes(b"")
    assert list(staged_trees(cache)) == [tree]


def test_the_last_use_of_a_tree_is_known(archive: Path, tmp_path: Path, unpack: Unpacker) -> None:
    staged(archive, tmp_path, unpack)
    (tree,) = staged_trees(tmp_path / "cache")
    os.utime(tree.folder / "staged.json", (1, 1))
    before = time.time()
    assert staged(archive, tmp_path, unpack).reused
    (again,) = staged_trees(tmp_path / "cache")
    assert before - 1 < again.used < time.time() + 1
