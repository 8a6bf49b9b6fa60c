"""Folders inside a hostile root: the kernel's way and the walk give the same answers, and none leaves the root."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oci_builder.model.errors import PolicyError
from oci_builder.rootfs.resolve import (
    FolderOpener,
    OpenFolder,
    kernel_resolves,
    open_by_kernel,
    open_by_walk,
)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text("victim")
    return folder


@pytest.fixture
def root(tmp_path: Path, outside: Path) -> Iterator[int]:
    top = tmp_path / "root"
    for folder in ("usr/lib/deep", "etc", "a/b/c", "outside"):
        (top / folder).mkdir(parents=True)
    (top / "etc/file").write_text("x")
    links = {
        "lib": "usr/lib", "abs": "/usr/lib", "up": "../../../..", "out": str(outside), "rel-out": "../outside",
        "loop1": "loop2", "loop2": "loop1", "self": "self", "dangling": "no/such", "to-file": "etc/file",
        "a/back": "../../a/b", "a/b/root": "/", "dotdot": "..", "chain0": "usr",
    }  # fmt: skip
    for name, target in links.items():
        (top / name).symlink_to(target)
    for number in range(1, 45):
        (top / f"chain{number}").symlink_to(f"chain{number - 1}")
    fd = os.open(top, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def where(open_folder: OpenFolder, root: int, path: bytes) -> str:
    """The path below the root that was opened, or the name of the error."""
    try:
        fd = open_folder(root, path)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    try:
        top, found = os.readlink(f"/proc/self/fd/{root}"), os.readlink(f"/proc/self/fd/{fd}")
        assert found == top or found.startswith(top + "/"), "left the root"
        return found[len(top) + 1 :]
    finally:
        os.close(fd)


CASES = {
    b"": "",
    b"usr/lib": "usr/lib",
    b"lib/deep": "usr/lib/deep",
    b"abs/deep": "usr/lib/deep",
    b"up/usr": "usr",
    b"up/outside": "outside",
    b"rel-out": "outside",
    b"out": "ENOENT",
    b"loop1/x": "ELOOP",
    b"self": "ELOOP",
    b"dangling/x": "ENOENT",
    b"to-file": "ENOTDIR",
    b"etc/file/x": "ENOTDIR",
    b"a/back/c": "a/b/c",
    b"a/b/root/usr": "usr",
    b"dotdot/dotdot/etc": "etc",
    b"lib/../../etc": "etc",
    b"chain40/lib": "ELOOP",
    b"chain39/lib": "usr/lib",
    b"x" * 256: "ENAMETOOLONG",
}


def conformance(open_folder: OpenFolder, root: int) -> None:
    """What every way of opening must do (C6-01, C6-02, C6-05, C6-07)."""
    for path, expected in CASES.items():
        assert where(open_folder, root, path) == expected, path


@pytest.mark.parametrize("way", [open_by_kernel, open_by_walk])
def test_conformance(way: OpenFolder, root: int) -> None:
    if way is open_by_kernel and not kernel_resolves(root):
        pytest.skip("this kernel has no openat2")
    conformance(way, root)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(
    [b"usr", b"lib", b"deep", b"..", b".", b"abs", b"up", b"out", b"rel-out", b"a", b"b", b"c", b"back", b"root",
     b"loop1", b"dangling", b"to-file", b"etc", b"file", b"dotdot", b"chain5", b"outside", b""]
), max_size=7))  # fmt: skip
def test_both_ways_agree(root: int, parts: list[bytes]) -> None:
    if not kernel_resolves(root):
        pytest.skip("this kernel has no openat2")
    path = b"/".join(parts)
    assert where(open_by_walk, root, path) == where(open_by_kernel, root, path)


def made_by(folder: int, name: bytes, path: bytes, error: OSError) -> None:
    os.mkdir(name, dir_fd=folder)


@pytest.mark.parametrize("use_kernel", [True, False])
@pytest.mark.parametrize(
    ("path", "lands"),
    [(b"new/er", "new/er"), (b"lib/new", "usr/lib/new"), (b"dangling/x", "no/such/x"), (b"up/up/n", "n")],
)
def test_missing_folders_are_made_where_the_links_lead(root: int, use_kernel: bool, path: bytes, lands: str) -> None:
    opener = FolderOpener(root, made_by, use_kernel)
    assert where(lambda _root, name: opener.open(name, create=True)[0], root, path) == lands
    fd, found = opener.open(path, create=False)
    os.close(fd)
    assert found == lands.encode()


@pytest.mark.parametrize("use_kernel", [True, False])
@pytest.mark.parametrize(("path", "code"), [(b"loop1/x", "path.loop"), (b"chain41/x", "path.loop")])
def test_c6_05_loops_are_refused_by_name(root: int, use_kernel: bool, path: bytes, code: str) -> None:
    opener = FolderOpener(root, made_by, use_kernel)
    with pytest.raises(PolicyError) as error:
        opener.open(path, create=True)
    assert error.value.code == code


def test_a_link_to_a_secret_beside_the_root_makes_a_folder_inside(root: int, outside: Path) -> None:
    """C6-02: the target of an absolute link is made below the root; the victim is not touched."""
    opener = FolderOpener(root, made_by)
    found = where(lambda _root, name: opener.open(name, create=True)[0], root, b"out/x")
    assert found == str(outside).lstrip("/") + "/x"
    assert [p.name for p in outside.iterdir()] == ["secret"]


def test_descriptors_do_not_leak(root: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    ways: list[Callable[[int, bytes], int]] = [open_by_walk, open_by_kernel]
    for way in ways:
        for path in CASES:
            where(way, root, path)
    assert len(os.listdir("/proc/self/fd")) == before
