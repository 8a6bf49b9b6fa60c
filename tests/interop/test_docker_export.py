"""The unpacked tree equals what ``docker export`` gives of the same image.

What Docker's export has otherwise is Docker's own, and each is looked for here, so that a change is seen:

- the mount points that it makes for every container (``ADDED``), and the times of the folders that they are in;
- extended attributes: it exports ``security.capability`` and no others;
- hard links before their target or into a lower layer: it does not load such a layer at all;
- a folder that an upper layer goes through and does not list becomes root's, 0755, of the present time (overlay2).
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from oci_builder.unpack import unpack_image
from oci_builder.verify import verify_archives
from tests.interop.lab import Docker
from tests.lab import tarlang as t
from tests.lab.archives import Lab, entry, tar, write

pytestmark = [pytest.mark.interop, pytest.mark.root]

# What a container gets besides its image.
ADDED = {".dockerenv", "dev", "dev/console", "dev/pts", "dev/shm", "proc", "sys", "etc", "etc/hostname", "etc/hosts",
         "etc/mtab", "etc/resolv.conf"}  # fmt: skip
CAPABILITY = bytes.fromhex("0100000200240000000000000000000000000000")

D = tarfile.DIRTYPE
LOWER = tar(
    entry("d", type=D, mode=0o750, uid=1, gid=2, mtime=1_000_000_000),
    entry("d/kept", b"kept", mode=0o4755, uid=3, mtime=1_100_000_000),
    entry("d/gone", b"gone"), entry("d/sub", type=D, mode=0o1777, mtime=5), entry("d/sub/deep", b"deep"),
    entry("o", type=D, mode=0o700, mtime=1_200_000_000), entry("o/low", b"low"), entry("o/l", type=D), entry("o/l/x", b"x"),
    entry("one", b"linked", mode=0o640, uid=7, gid=8, mtime=1_300_000_000),
    entry("two", type=tarfile.LNKTYPE, linkname="one", mode=0o640, uid=7, gid=8, mtime=1_300_000_000),
    entry("three", type=tarfile.LNKTYPE, linkname="one", mode=0o640, uid=7, gid=8, mtime=1_300_000_000),
    entry("cap", b"cap", mode=0o755, pax_headers={"SCHILY.xattr.security.capability": CAPABILITY.decode("latin-1")}),
    entry("user", b"user", pax_headers={"SCHILY.xattr.user.note": "hello"}),
    entry("to", type=tarfile.SYMTYPE, linkname="../d/kept", mode=0o777, uid=9, mtime=1_400_000_000),
    entry("shut", type=D, mode=0, mtime=77), entry("shut/in", b"in", mode=0),
    entry("swap", b"a file"), entry("tree", type=D), entry("tree/x", b"x"),
    entry("pipe", type=tarfile.FIFOTYPE, mode=0o600), entry("sticky", b"s", mode=0o2711, gid=12),
)  # fmt: skip
UPPER = tar(
    entry("d", type=D, mode=0o755, uid=1, gid=2, mtime=1_500_000_000), entry("d/.wh.gone"),
    entry("d/sub", type=D, mode=0o1777, mtime=5), entry("d/sub/.wh.deep"),
    entry("o", type=D, mode=0o711, mtime=1_600_000_000), entry("o/new", b"new", mtime=3), entry("o/.wh..wh..opq"),
    entry("two", b"not linked any more"),
    entry("swap", type=D, mode=0o711, mtime=9), entry("swap/in", b"in"),
    entry("tree", b"a file now"),
    entry(".wh.absent"), entry("long", type=D, mtime=8), entry("long/" + "n" * 200, b"long"),
)  # fmt: skip
TOP = tar(
    entry("d", type=D, mode=0o751, uid=1, gid=2, mtime=1_500_000_001), entry("d/sub", type=D, mode=0o1770, mtime=6),
    entry("d/sub/again", b"again", mtime=4),
)  # fmt: skip


def facts(kind: str, mode: int, owner: tuple[int, int], mtime: int, value: str, capability: bytes) -> dict[str, Any]:
    # A link's mode is nothing, and of folders a container's mounts change the time.
    return {"kind": kind, "mode": 0 if kind == "link" else mode, "owner": owner, "mtime": mtime, "value": value,
            "capability": capability}  # fmt: skip


def ours(root: Path) -> dict[str, dict[str, Any]]:
    """The tree on disk. Hard links show their content, as each name does."""
    out: dict[str, dict[str, Any]] = {}
    for above, folders, files in os.walk(root):
        for name in folders + files:
            full = os.path.join(above, name)
            status = os.lstat(full)
            kind = {stat.S_IFDIR: "dir", stat.S_IFLNK: "link", stat.S_IFIFO: "fifo"}.get(stat.S_IFMT(status.st_mode), "file")
            value = os.readlink(full) if kind == "link" else sha_of(Path(full).read_bytes()) if kind == "file" else ""
            has = kind == "file" and "security.capability" in os.listxattr(full)
            out[os.path.relpath(full, root)] = facts(
                kind, stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid), int(status.st_mtime), value,
                os.getxattr(full, "security.capability") if has else b"",
            )  # fmt: skip
    return out


def exported(data: bytes) -> tuple[dict[str, dict[str, Any]], dict[str, str], set[str]]:
    """What an exported tar holds; its hard links; all names of extended attributes."""
    out: dict[str, dict[str, Any]] = {}
    links: dict[str, str] = {}
    xattrs: set[str] = set()
    prefix = "SCHILY.xattr."
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            name = member.name.rstrip("/")
            xattrs |= {key[len(prefix) :] for key in member.pax_headers if key.startswith(prefix)}
            if member.islnk():
                links[name] = member.linkname
                out[name] = out[member.linkname]
                continue
            kind = "dir" if member.isdir() else "link" if member.issym() else "fifo" if member.isfifo() else "file"
            file = archive.extractfile(member) if member.isreg() else None
            value = member.linkname if kind == "link" else sha_of(file.read()) if file else ""
            raw = member.pax_headers.get(prefix + "security.capability", "")
            out[name] = facts(kind, member.mode & 0o7777, (member.uid, member.gid), int(member.mtime), value,
                              raw.encode("utf-8", "surrogateescape"))  # fmt: skip
    return out, links, xattrs


def sha_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def export(engine: Docker, archive: Path) -> bytes:
    engine.load(archive)
    container = engine("create", "--network", "none", "lab/image:1", "x").strip()
    socket = f"unix://{engine.socket}"
    return subprocess.run(["docker", "-H", socket, "export", container], check=True, capture_output=True).stdout


def test_docker_exports_the_same_tree(engine: Docker, tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", Lab(layers=[LOWER, UPPER, TOP]).oci())
    assert verify_archives([archive]).ok
    unpack_image(archive, tmp_path / "root")
    theirs, links, xattrs = exported(export(engine, archive))
    mine = ours(tmp_path / "root")
    assert {name: theirs.get(name) for name in mine} == mine
    assert set(theirs) - set(mine) <= ADDED, "Docker's own mount points"
    assert links.keys() | set(links.values()) == {"one", "three"}, "hard links are as we make them"
    one, three = (os.stat(tmp_path / "root" / name) for name in ("one", "three"))
    assert one.st_ino == three.st_ino != os.stat(tmp_path / "root" / "two").st_ino
    assert xattrs == {"security.capability"}, "Docker exports no user attributes: its fault, ours keeps them"
    assert os.getxattr(tmp_path / "root" / "user", "user.note") == b"hello"


@pytest.mark.parametrize("layers", [
    [t.tar(t.hardlink(b"a", b"b"), t.file(b"b", b"1"))], [t.tar(t.file(b"b", b"1")), t.tar(t.hardlink(b"a", b"b"))],
], ids=["late", "lower"])  # fmt: skip
def test_docker_does_not_load_these_links(engine: Docker, tmp_path: Path, layers: list[bytes]) -> None:
    """C6-10, C6-13: a hard link before its target, and one into a lower layer: "link /b /a: no such file"."""
    archive = write(tmp_path / "a.tar", Lab(layers=layers).oci())
    unpack_image(archive, tmp_path / "root")
    assert (tmp_path / "root" / "a").read_bytes() == b"1"
    with pytest.raises(AssertionError):
        engine.load(archive)


def test_docker_changes_folders_that_a_layer_does_not_list(engine: Docker, tmp_path: Path) -> None:
    """image-spec's layer.md wants parents listed; where they are not, ours stay as the lower layer has them (C7-06)."""
    lower = tar(entry("d", type=D, mode=0o750, uid=1, gid=2, mtime=1_000_000_000))
    archive = write(tmp_path / "a.tar", Lab(layers=[lower, tar(entry("d/x", b"x"))]).oci())
    unpack_image(archive, tmp_path / "root")
    mine, theirs = ours(tmp_path / "root")["d"], exported(export(engine, archive))[0]["d"]
    assert (mine["mode"], mine["owner"]) == (0o750, (1, 2))
    assert (theirs["mode"], theirs["owner"]) in ((0o755, (0, 0)), (0o750, (1, 2))), "overlay2; vfs"
