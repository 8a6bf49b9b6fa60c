"""Fingerprints of trees, and which files are proved equal with how little reading."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError, SpecError
from oci_builder.rootfs.scan import SourceEntry, Tree, scan_tree
from oci_builder.rootfs.scan_content import LINK_FLOOR, content_digests, hash_source
from oci_builder.rootfs.scan_fingerprint import SETTLE_NS, fingerprint, fingerprints
from oci_builder.store.cache import BuildCache


def fill(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def settle() -> None:
    time.sleep(SETTLE_NS / 1e9 * 1.5)


def entry(tree: Tree, path: bytes) -> SourceEntry:
    return next(found for found in tree.entries if found.path == path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return fill(tmp_path / "tree", {"a": b"1", "d/b": b"2", "d/e/c": b"3"})


def test_a_fingerprint_repeats_while_nothing_changes(tree: Path) -> None:
    settle()
    first = fingerprint(tree)
    (tree / "d/b").read_bytes()
    assert fingerprint(tree) == first
    assert fingerprint(tree.parent / "tree/../tree") == first


@pytest.mark.parametrize(
    "change",
    [
        lambda t: (t / "a").write_bytes(b"9"),
        lambda t: (t / "a").chmod(0o600),
        lambda t: os.utime(t / "a", ns=(0, 0)),
        lambda t: (t / "d/e/new").write_bytes(b""),
        lambda t: (t / "d/e/c").unlink(),
        lambda t: (t / "d/b").rename(t / "d/z"),
        lambda t: os.link(t / "a", t / "link"),
        lambda t: (t / "d").chmod(0o700),
        lambda t: t.chmod(0o700),
        lambda t: (t / "a").replace(t / "d/b"),
        lambda t: ((t / "d/z").write_bytes(b"1"), (t / "d/z").replace(t / "a")),
        lambda t: ((t / "s").unlink(), (t / "s").symlink_to("b")),
        lambda t: (t / "empty").rmdir(),
        lambda t: (t / "empty").rename(t / "d/empty"),
        lambda t: os.setxattr(t / "a", "user.note", b"1"),
        lambda t: os.chown(t / "a", 1, -1),
        lambda t: os.chown(t / "s", -1, 1, follow_symlinks=False),
    ],
)
def test_any_change_changes_the_fingerprint(tree: Path, change: object) -> None:
    (tree / "s").symlink_to("a")
    (tree / "empty").mkdir()
    settle()
    first = fingerprint(tree)
    settle()
    try:
        change(tree)  # type: ignore[operator]
    except OSError as error:
        pytest.skip(f"not here: {error}")
    assert fingerprint(tree) != first


def test_several_trees_at_once_have_the_fingerprints_that_each_has_alone(tree: Path, tmp_path: Path) -> None:
    odd = fill(tmp_path / os.fsdecode(b"odd \xff\n"), {os.fsdecode(b"\xfe"): b"1", "-x": b"2"})
    link = tmp_path / "link"
    link.symlink_to(tree)
    settle()
    assert fingerprints([tree, odd, link]) == [fingerprint(tree), fingerprint(odd), fingerprint(tree)]


def test_a_tree_that_is_gone_is_told_among_several(tree: Path) -> None:
    with pytest.raises(SpecError) as caught:
        fingerprints([tree, tree / "nothing"])
    assert caught.value.code == "scan.changed"


def test_a_write_that_restores_size_and_mtime_changes_the_fingerprint(tree: Path) -> None:
    before = (tree / "a").stat()
    settle()
    first = fingerprint(tree)
    (tree / "a").write_bytes(b"9")
    os.utime(tree / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fingerprint(tree) != first


def test_a_name_elsewhere_changes_no_fingerprint_of_linked_files_and_writing_does(tree: Path, tmp_path: Path) -> None:
    """uv's cache and other environments give and take names of an environment's files."""
    settle()
    first, strict = fingerprints([tree, tree / "d"], linked=[tree]), fingerprint(tree)
    assert first == [fingerprint(tree, linked=True), fingerprint(tree / "d")]
    os.link(tree / "a", tmp_path / "second")
    settle()
    assert fingerprint(tree, linked=True) == first[0] and fingerprint(tree) != strict
    (tmp_path / "second").unlink()
    (tree / "a").write_bytes(b"9")
    settle()
    assert fingerprint(tree, linked=True) != first[0]


def test_a_tree_that_keeps_changing_gives_no_answer_to_trust(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that went back makes all times lie in the future."""
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    assert "-" in fingerprint(tree)


def test_equal_sizes_across_trees_are_read_and_nothing_else(tmp_path: Path) -> None:
    one = fill(tmp_path / "one", {"same": b"abc", "alone": b"12345", "twin": b"22", "twin2": b"33", "empty": b""})
    two = fill(tmp_path / "two", {"copy": b"abc", "other": b"xyz", "long": b"1234567", "empty": b""})
    trees = [scan_tree(one), scan_tree(two)]
    digests = content_digests(trees)
    read = {entry.path for tree in trees for entry in tree.entries if entry.inode in digests}
    assert read == {b"same", b"copy", b"other"}
    assert digests[entry(trees[0], b"same").inode] == digests[entry(trees[1], b"copy").inode]
    assert digests[entry(trees[1], b"other").inode] != digests[entry(trees[1], b"copy").inode]


def test_hard_links_across_trees_are_proved_equal_without_reading(tmp_path: Path) -> None:
    one = fill(tmp_path / "one", {"f": b"x" * 100_000})
    two = tmp_path / "two"
    two.mkdir()
    os.link(one / "f", two / "f")
    assert content_digests([scan_tree(one), scan_tree(two)]) == {}


def test_large_twins_of_one_tree_are_read(tmp_path: Path) -> None:
    data = bytes(LINK_FLOOR)
    root = fill(tmp_path / "one", {"a": data, "b": data})
    assert len(set(content_digests([scan_tree(root)]).values())) == 1


def test_digests_are_remembered_by_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = fill(tmp_path / "one", {"f": b"abc"}), fill(tmp_path / "two", {"f": b"abd"})
    settle()
    with BuildCache(tmp_path / "cache.db") as cache:
        first = content_digests([scan_tree(one), scan_tree(two)], cache=cache)
        monkeypatch.setattr("oci_builder.rootfs.scan_content.os.read", _no_reading)
        assert content_digests([scan_tree(one), scan_tree(two)], cache=cache) == first
        monkeypatch.undo()
        settle()
        fill(two, {"f": b"abc"})
        settle()
        assert len(set(content_digests([scan_tree(one), scan_tree(two)], cache=cache).values())) == 1


def test_a_file_that_is_too_fresh_is_not_remembered(tmp_path: Path) -> None:
    """It could change once more within the same tick of the clock."""
    one, two = fill(tmp_path / "one", {"f": b"abc"}), fill(tmp_path / "two", {"f": b"abd"})
    trees = [scan_tree(one), scan_tree(two)]
    fresh = [Tree(tree.root, tree.entries, (), entry(tree, b"f").ctime_ns) for tree in trees]
    with BuildCache(tmp_path / "cache.db") as cache:
        content_digests(fresh, cache=cache)
        assert cache.known_hashes([entry(trees[0], b"f").identity]) == {}


def _no_reading(*_: object) -> bytes:
    raise AssertionError("a file was read")


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.write_bytes(b"longer than before"),
        lambda f: f.write_bytes(b"sam"),
        lambda f: (f.unlink(), f.write_bytes(b"same")),
        lambda f: (f.unlink(), f.symlink_to("/etc/passwd")),
        lambda f: f.unlink(),
        lambda f: (f.unlink(), os.mkfifo(f)),
    ],
)
def test_a_file_that_changed_since_the_scan_is_refused(tmp_path: Path, change: object) -> None:
    """C8-13, and a link or fifo put in its place is not followed or waited for (B124)."""
    root = fill(tmp_path / "tree", {"f": b"same"})
    settle()
    found = entry(scan_tree(root), b"f")
    change(root / "f")  # type: ignore[operator]
    with pytest.raises(OciBuilderError) as caught:
        hash_source(os.fsencode(root / "f"), found)
    assert caught.value.code == "scan.changed"
    assert "'f'" in str(caught.value) or "/f'" in str(caught.value)


def test_a_file_that_another_environment_links_meanwhile_did_not_change(tmp_path: Path) -> None:
    """uv installs from one cache: a link comes and another goes while this tree is read, and only ctime tells."""
    root = fill(tmp_path / "tree", {"f": b"same"})
    os.link(root / "f", tmp_path / "cached")
    settle()
    found = entry(scan_tree(root), b"f")
    os.link(root / "f", tmp_path / "elsewhere")
    assert len(hash_source(os.fsencode(root / "f"), found)) == 32
    (tmp_path / "elsewhere").unlink()
    assert (root / "f").stat().st_nlink == found.nlink
    assert len(hash_source(os.fsencode(root / "f"), found)) == 32


def test_a_write_that_restores_the_mtime_of_an_unlinked_file_is_a_change(tmp_path: Path) -> None:
    root = fill(tmp_path / "tree", {"f": b"same"})
    settle()
    found = entry(scan_tree(root), b"f")
    (root / "f").write_bytes(b"emas")
    os.utime(root / "f", ns=(found.mtime_ns, found.mtime_ns))
    with pytest.raises(OciBuilderError, match=r"scan\.changed"):
        hash_source(os.fsencode(root / "f"), found)


def test_what_is_excluded_has_no_part_in_the_fingerprint(tree: Path) -> None:
    """A live root: /proc and scratch folders change at all times, also while they are looked at."""
    (tree / "scratch").mkdir()
    settle()
    first = fingerprint(tree, ["scratch"])
    (tree / "scratch/new").write_text("x")
    assert fingerprint(tree, ["scratch"]) == first
