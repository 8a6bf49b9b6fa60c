"""Scanning live trees: what is kept, what is refused, and that nothing is followed or opened."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError, PolicyError
from oci_builder.model.limits import Limits
from oci_builder.rootfs.scan import BASE_POLICY, ScanPolicy, SourceEntry, Tree, scan_tree
from oci_builder.wire.tar import Kind

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    return root


def by_name(tree: Tree) -> dict[bytes, SourceEntry]:
    return {entry.path: entry for entry in tree.entries}


def refused(root: Path, **options: object) -> str:
    with pytest.raises(OciBuilderError) as caught:
        scan_tree(root, **options)  # type: ignore[arg-type]
    return caught.value.code


def test_entries_are_sorted_by_component_with_the_root_first(tree: Path) -> None:
    for name in ("b", "a/z", "a/y/x", "a.txt", "a-b"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    names = [entry.path for entry in scan_tree(tree).entries]
    assert names == [b"", b"a", b"a/y", b"a/y/x", b"a/z", b"a-b", b"a.txt", b"b"]


def test_metadata_is_what_lstat_says(tree: Path) -> None:
    file = tree / "f"
    file.write_bytes(b"12345")
    file.chmod(0o640)
    os.utime(file, ns=(1, 1_234_567_890_123_456_789))
    entry = by_name(scan_tree(tree))[b"f"]
    found = file.stat()
    assert (entry.kind, entry.size, entry.mode, entry.mtime_ns) == (Kind.FILE, 5, 0o640, 1_234_567_890_123_456_789)
    assert entry.identity == (found.st_dev, found.st_ino, 5, found.st_mtime_ns, found.st_ctime_ns)


def test_links_are_kept_and_never_followed(tree: Path, tmp_path: Path) -> None:
    """C8-14: a link to a secret, and one to a folder outside, are stored as links."""
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "key").write_text("secret")
    (tree / "file").symlink_to(secret / "key")
    (tree / "folder").symlink_to(secret)
    (tree / "dangling").symlink_to("nowhere")
    found = by_name(scan_tree(tree))
    assert {name: entry.kind for name, entry in found.items() if name} == dict.fromkeys(
        (b"file", b"folder", b"dangling"), Kind.SYMLINK
    )
    assert found[b"folder"].link == os.fsencode(secret)


def test_sockets_are_left_out_with_a_warning_that_names_them(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B123."""
    with socket.socket(socket.AF_UNIX) as agent:
        monkeypatch.chdir(tree)  # such a name has 107 bytes at most
        agent.bind("agent.sock")
        scanned = scan_tree(tree)
    assert [entry.path for entry in scanned.entries] == [b""]
    assert [finding.code for finding in scanned.warnings] == ["scan.socket"]
    assert "agent.sock" in scanned.warnings[0].message


def test_a_fifo_is_refused_and_not_opened(tree: Path) -> None:
    """B123, B124: opening it would hang."""
    os.mkfifo(tree / "pipe")
    program = (
        "import sys; from pathlib import Path; from oci_builder.rootfs.scan import scan_tree\n"
        "try: scan_tree(Path(sys.argv[1]))\n"
        "except Exception as e: print(e.code)"
    )
    done = subprocess.run([sys.executable, "-c", program, tree], capture_output=True, text=True, timeout=300)
    assert done.stdout == "entry.special\n"


@needs_root
def test_devices_are_refused_in_a_tier_and_left_out_of_a_base(tree: Path) -> None:
    """C8-03."""
    (tree / "dev").mkdir()
    os.mknod(tree / "dev/null", 0o20666, os.makedev(1, 3))
    assert refused(tree) == "entry.device"
    scanned = scan_tree(tree, policy=BASE_POLICY)
    assert [entry.path for entry in scanned.entries] == [b"", b"dev"]
    assert scanned.warnings[0].code == "scan.node"
    os.mknod(tree / "dev/sda", 0o60600, os.makedev(8, 0))
    assert refused(tree, policy=BASE_POLICY) == "entry.device"


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6755])
def test_set_id_files_are_refused_in_a_tier_and_kept_in_a_base(tree: Path, mode: int) -> None:
    """C8-05."""
    (tree / "su").write_text("x")
    (tree / "su").chmod(mode)
    assert refused(tree) == "entry.setuid"
    assert by_name(scan_tree(tree, policy=BASE_POLICY))[b"su"].mode == mode


def test_an_inherited_setgid_bit_of_a_folder_is_cleared_with_a_warning(tree: Path) -> None:
    (tree / "d").mkdir()
    (tree / "d").chmod(0o2775)
    scanned = scan_tree(tree)
    assert by_name(scanned)[b"d"].mode == 0o775
    assert scanned.warnings[0].code == "scan.setgid"


@pytest.mark.parametrize("name", [".wh.x", ".wh.", ".wh..wh..opq"])
@pytest.mark.parametrize("make", ["file", "folder", "link"])
def test_names_that_mean_a_whiteout_are_refused(tree: Path, name: str, make: str) -> None:
    """C4-13."""
    place = tree / "d" / name
    place.parent.mkdir()
    match make:
        case "file":
            place.write_text("")
        case "folder":
            place.mkdir()
        case _:
            place.symlink_to("x")
    assert refused(tree) == "layers.whiteout"


def test_only_the_allowed_extended_attributes_are_kept(tree: Path) -> None:
    """C8-09, C8-11."""
    (tree / "f").write_text("x")
    try:
        os.setxattr(tree / "f", "user.note", b"\0binary\xff")
        os.setxattr(tree / "f", "user.empty", b"")
        if os.geteuid() == 0:
            os.setxattr(tree / "f", "trusted.overlay.opaque", b"y")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    assert by_name(scan_tree(tree))[b"f"].xattrs == ((b"user.empty", b""), (b"user.note", b"\0binary\xff"))


@needs_root
def test_dropped_extended_attributes_are_warned_about_once(tree: Path) -> None:
    """C8-09: labels of this machine and its access lists do not travel, and that is said with their names."""
    (tree / "d").mkdir()
    for name in ("a", "b", "c", "d/e"):
        (tree / name).write_text("x")
    os.link(tree / "a", tree / "again")
    try:
        os.setxattr(tree / "a", "trusted.note", b"y")
        os.setxattr(tree / "b", "security.note", b"y")
        os.setxattr(tree / "b", "user.note", b"kept")
        # uapi/linux/posix_acl_xattr.h: version 2; owner, a named user, group, mask and others.
        entries = ((1, 6, -1), (2, 4, 1000), (4, 4, -1), (16, 4, -1), (32, 4, -1))
        access = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
        os.setxattr(tree / "d", "system.posix_acl_default", access)
        os.setxattr(tree / "d/e", "system.posix_acl_access", access)
    except OSError as error:
        pytest.skip(f"no such extended attributes here: {error}")
    scanned = scan_tree(tree)
    (found,) = scanned.warnings
    assert (found.code, found.severity) == ("scan.xattr", "warning")
    for said in ("4 entries", "'a'", "'d/e'", "trusted.note", "security.note", "posix_acl_access", "posix_acl_default"):
        assert said in found.message
    assert "user.note" not in found.message and "'again'" not in found.message
    assert by_name(scanned)[b"b"].xattrs == ((b"user.note", b"kept"),)


def test_nothing_is_said_of_attributes_that_are_kept(tree: Path) -> None:
    (tree / "f").write_text("x")
    try:
        os.setxattr(tree / "f", "user.note", b"x")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    assert scan_tree(tree).warnings == ()


@pytest.mark.parametrize("make", ["fifo", ".wh.x"])
def test_a_remedy_is_named_only_where_there_is_one(tree: Path, make: str) -> None:
    """A tier has no exclusions, a base folder has."""
    if make == "fifo":
        os.mkfifo(tree / "pipe")
    else:
        (tree / make).write_text("")
    for policy, has in ((ScanPolicy(), False), (ScanPolicy(excluder="base.exclude"), True)):
        with pytest.raises(OciBuilderError) as caught:
            scan_tree(tree, policy=policy)
        assert ("exclude" in caught.value.message) == has
        assert "remove it" in caught.value.message


def test_names_that_are_not_utf8_are_kept(tree: Path) -> None:
    """B114, C5-08: caf\\xe9, a newline, an escape, and a name that looks like a parent and is none (C5-10)."""
    names = {b"caf\xe9", b"new\nline", b"esc\x1b[0m", b"..gitme", b"\xff" * 255}
    for name in names:
        (Path(os.fsdecode(os.fsencode(tree) + b"/" + name))).write_bytes(b"x")
    assert {entry.path for entry in scan_tree(tree).entries} == names | {b""}


def test_a_path_that_the_system_does_not_read_is_a_name_too_long(tree: Path) -> None:
    """Each part is legal, and so is every path relative to a folder below; as a whole it is over PATH_MAX."""
    here = os.open(tree, os.O_RDONLY)
    for _ in range(17):
        os.mkdir("d" * 250, dir_fd=here)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(PolicyError) as caught:
        scan_tree(tree)
    assert caught.value.code == "limit.name" and len(caught.value.message) < 300


def test_hard_links_share_an_inode(tree: Path) -> None:
    """C6-15."""
    (tree / "a").write_text("x")
    os.link(tree / "a", tree / "b")
    found = by_name(scan_tree(tree))
    assert found[b"a"].inode == found[b"b"].inode
    assert found[b"a"].nlink == 2


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(entries=3), "limit.entries"),
        (Limits(depth=2), "limit.depth"),
        (Limits(entry_size=4), "limit.entry"),
        (Limits(name=5), "limit.name"),
    ],
)
def test_limits_hold(tree: Path, limits: Limits, code: str) -> None:
    """C7-19."""
    (tree / "a/b/c").mkdir(parents=True)
    (tree / "a/b/c/file").write_bytes(b"12345")
    assert refused(tree, limits=limits) == code


def test_a_root_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert refused(tmp_path / "absent") == "scan.root"
    assert refused(tmp_path / "file") == "scan.root"


def test_a_root_may_be_given_through_a_link(tree: Path, tmp_path: Path) -> None:
    (tree / "f").write_text("x")
    (tmp_path / "link").symlink_to(tree)
    assert [entry.path for entry in scan_tree(tmp_path / "link").entries] == [b"", b"f"]


def test_exclusions_take_a_folder_with_all_below_it(tree: Path) -> None:
    for name in ("keep/x", "drop/y/z", "keep/drop.pyc"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    policy = ScanPolicy(exclude=("drop", "*.pyc"))
    assert [entry.path for entry in scan_tree(tree, policy=policy).entries] == [b"", b"keep", b"keep/x"]


@pytest.fixture
def unreadable(tree: Path) -> Iterator[Path]:
    (tree / "closed").mkdir()
    (tree / "closed").chmod(0)
    yield tree
    (tree / "closed").chmod(0o700)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_an_unreadable_folder_is_an_io_error(unreadable: Path) -> None:
    assert refused(unreadable) == "io.error"
