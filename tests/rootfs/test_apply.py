"""What an applied layer's entries become: owners, modes, times, attributes, nodes, as root and as an ordinary user."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError, PolicyError
from oci_builder.unpack import UnpackOptions, UnpackReport, unpack_image
from tests.lab import tarlang as t
from tests.lab.archives import Lab, entry, tar, write

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
UID = 65534


@pytest.fixture(autouse=True)
def writable(tmp_path: Path) -> Iterator[None]:
    yield
    subprocess.run(["chmod", "-R", "u+rwx", str(tmp_path)], check=False)


def unpack(tmp_path: Path, *layers: bytes, **options: object) -> UnpackReport:
    archive = write(tmp_path / "a.tar", Lab(layers=list(layers)).oci())
    return unpack_image(archive, tmp_path / "dest", UnpackOptions(**options))  # type: ignore[arg-type]


def codes(report: UnpackReport) -> dict[str, int]:
    return {finding.code: int(finding.actual) for finding in report.warnings}


@root_only
def test_c8_05_setuid_survives_the_owner(tmp_path: Path) -> None:
    folder_entry = entry("d", type=tarfile.DIRTYPE, mode=0o2775, gid=7)
    unpack(tmp_path, tar(entry("su", b"x", mode=0o4755, uid=5, gid=6), folder_entry))
    file, folder = (tmp_path / "dest/su").stat(), (tmp_path / "dest/d").stat()
    assert (file.st_uid, file.st_gid, stat.S_IMODE(file.st_mode)) == (5, 6, 0o4755)
    assert (folder.st_gid, stat.S_IMODE(folder.st_mode)) == (7, 0o2775)


@root_only
def test_b116_capabilities_survive(tmp_path: Path) -> None:
    capability = bytes.fromhex("0100000200040000000000000000000000000000")
    layer = t.tar(t.pax(t.record(b"SCHILY.xattr.security.capability", capability)), t.file(b"ping", b"x", uid=3))
    report = unpack(tmp_path, layer)
    try:
        assert os.getxattr(tmp_path / "dest/ping", "security.capability") == capability
    except OSError:
        assert "entry.xattr" in codes(report)


def test_b059_attributes_that_cannot_be_set_are_counted(tmp_path: Path) -> None:
    layer = t.tar(
        t.pax(t.record(b"SCHILY.xattr.security.selinux", b"label")), t.file(b"a"),
        t.pax(t.record(b"SCHILY.xattr.user.k", b"")), t.file(b"b"),
        t.pax(t.record(b"SCHILY.xattr.user.k", b"v")), t.symlink(b"l", b"a"),
    )  # fmt: skip
    found = codes(unpack(tmp_path, layer))
    assert found["entry.xattr_policy"] == 1
    assert found["entry.xattr"] >= 1
    assert "security.selinux" not in os.listxattr(tmp_path / "dest/a")


def test_folders_get_their_times_last(tmp_path: Path) -> None:
    """A later layer's file leaves the time of a folder without an entry; fractions and times before 1970 hold."""
    first = tar(entry("d", type=tarfile.DIRTYPE, mode=0o755, mtime=1000), entry("d/a", b"1", mtime=-5))
    second = t.tar(t.pax(t.record(b"mtime", b"12.000000345")), t.file(b"d/b", b"2"))
    unpack(tmp_path, first, second)
    assert (tmp_path / "dest/d").stat().st_mtime_ns == 1000 * 10**9
    assert (tmp_path / "dest/d/a").stat().st_mtime == -5
    assert (tmp_path / "dest/d/b").stat().st_mtime_ns == 12_000_000_345


def test_b121_the_root_is_0755_unless_the_image_says_otherwise(tmp_path: Path) -> None:
    unpack(tmp_path, t.tar(t.file(b"a")))
    assert stat.S_IMODE((tmp_path / "dest").stat().st_mode) == 0o755
    shutil.rmtree(tmp_path / "dest")
    unpack(tmp_path, t.tar(t.header(b"./", kind=b"5", mode=0o711, mtime=77), t.file(b"a")))
    assert stat.S_IMODE((tmp_path / "dest").stat().st_mode) == 0o711
    assert (tmp_path / "dest").stat().st_mtime == 77


def test_b120_tmp_keeps_its_sticky_bit(tmp_path: Path) -> None:
    unpack(tmp_path, t.tar(t.folder(b"tmp", mode=0o1777)), t.tar(t.file(b"tmp/x")))
    assert stat.S_IMODE((tmp_path / "dest/tmp").stat().st_mode) == 0o1777


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o177])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        unpack(tmp_path, t.tar(t.file(b"a", mode=0o666), t.folder(b"d", mode=0o777), t.file(b"i/x", mode=0o755)))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / "dest" / n).stat().st_mode) for n in ("a", "d", "i", "i/x")]
    assert modes == [0o666, 0o777, 0o755, 0o755]


@root_only
def test_c8_03_standard_devices_are_made_by_root(tmp_path: Path) -> None:
    report = unpack(tmp_path, t.tar(t.header(b"dev/null", kind=b"3", mode=0o666, major=1, minor=3)))
    try:
        node = (tmp_path / "dest/dev/null").lstat()
    except FileNotFoundError:
        assert codes(report) == {"entry.device": 1}  # a user namespace
    else:
        assert stat.S_ISCHR(node.st_mode)
        assert (os.major(node.st_rdev), os.minor(node.st_rdev), stat.S_IMODE(node.st_mode)) == (1, 3, 0o666)


@pytest.mark.parametrize("node", [
    t.header(b"n", kind=b"3", major=1, minor=3), t.header(b"n", kind=b"4", major=8), t.header(b"n", kind=b"6"),
])  # fmt: skip
def test_c8_03_strict_refuses_every_node(tmp_path: Path, node: bytes) -> None:
    with pytest.raises(OciBuilderError) as error:
        unpack(tmp_path, t.tar(node), strict=True)
    assert error.value.code == "entry.device"


@pytest.mark.parametrize(("layer", "code"), [
    (t.tar(t.hardlink(b"a", b"f"), t.file(b"f")), "entry.link_target"),
    (t.tar(t.file(b"f"), t.file(b"f")), "entry.duplicate"),
    (t.tar(t.folder(b"d"), t.folder(b"d")), "entry.duplicate"),
    (t.tar(t.file(b"/f")), "path.absolute"),
])  # fmt: skip
def test_strict(tmp_path: Path, layer: bytes, code: str) -> None:
    with pytest.raises(OciBuilderError) as error:
        unpack(tmp_path, layer, strict=True)
    assert error.value.code == code
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize("twice", [
    [t.file(b"f", b"1"), t.file(b"f", b"2")], [t.file(b"f"), t.folder(b"f")], [t.folder(b"d"), t.folder(b"d")],
    [t.file(b"d/x"), t.file(b"d")], [t.symlink(b"l", b"d"), t.file(b"d/x"), t.file(b"l/x")],
    [t.file(b"f"), t.hardlink(b"f", b"f")], [t.hardlink(b"a", b"f"), t.file(b"a"), t.file(b"f")],
])  # fmt: skip
def test_b027_a_name_that_stands_twice_in_a_layer_is_refused(tmp_path: Path, twice: list[bytes]) -> None:
    """C7-05: readers differ in which one they take, and image-spec's layer.md forbids it."""
    with pytest.raises(PolicyError) as error:
        unpack(tmp_path, t.tar(*twice))
    assert error.value.code == "entry.duplicate"


def test_a_chain_of_20_000_early_links_takes_no_quadratic_time(tmp_path: Path) -> None:
    count = 20_000
    links = [t.hardlink(b"l%d" % n, b"l%d" % (n + 1)) for n in range(count)]
    report = unpack(tmp_path, t.tar(*links, t.file(b"l%d" % count, b"x")))
    assert report.summary["hardlink"] == count
    assert (tmp_path / "dest/l0").stat().st_nlink == count + 1


def test_c4_04_a_hidden_folder_loses_its_looks_whichever_comes_first(tmp_path: Path) -> None:
    """A folder that is there only for what an upper layer has in it: mode and time are not the lower layer's."""
    lower = t.tar(t.folder(b"d", mode=0o700, mtime=5), t.file(b"d/old"))
    looks = []
    parts = [t.file(b".wh.d"), t.file(b"d/new")]
    for number, upper in enumerate((t.tar(*parts), t.tar(*parts[::-1]))):
        (tmp_path / str(number)).mkdir()
        unpack(tmp_path / str(number), lower, upper)
        folder = tmp_path / str(number) / "dest/d"
        assert os.listdir(folder) == ["new"]
        looks.append((folder.stat().st_mode, folder.stat().st_mtime))
    assert looks[0] == looks[1]


def test_a_folder_keeps_its_looks_when_a_link_to_it_is_replaced(tmp_path: Path) -> None:
    """Folders made through lib -> usr/lib are dressed where they are, though lib is a folder in the end."""
    first = t.tar(t.folder(b"usr/lib"), t.symlink(b"lib", b"usr/lib"), t.folder(b"lib/d", mode=0o750, mtime=9))
    unpack(tmp_path, first, t.tar(t.folder(b"lib"), t.file(b"lib/x")))
    folder = (tmp_path / "dest/usr/lib/d").stat()
    assert (stat.S_IMODE(folder.st_mode), folder.st_mtime) == (0o750, 9)
    assert not (tmp_path / "dest/lib").is_symlink()


AS_USER = """
import sys
from pathlib import Path
from oci_builder.unpack import unpack_image
report = unpack_image(Path(sys.argv[1]), Path(sys.argv[2]))
print(" ".join(sorted(f"{f.code}={f.actual}" for f in report.warnings)))
"""


@root_only
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv")
def test_b054_an_ordinary_user(tmp_path: Path) -> None:
    """B054: folders without write permission; owners become the user's and nodes are left out, both counted."""
    layer = t.tar(
        t.folder(b"ro", mode=0o555), t.file(b"ro/file", b"1", mode=0o444), t.folder(b"none", mode=0), t.file(b"none/f"),
        t.file(b"su", b"x", mode=0o4755), t.header(b"null", kind=b"3", major=1, minor=3), t.hardlink(b"null2", b"null"),
        t.file(b"mine", uid=UID, gid=UID),
    )  # fmt: skip
    archive = write(tmp_path / "a.tar", Lab(layers=[layer, t.tar(t.file(b"ro/more"))]).oci())
    place = Path(f"/tmp/oci-builder-test-{secrets.token_hex(4)}")
    place.mkdir(mode=0o700)
    os.chown(place, UID, UID)
    shutil.copy(archive, place / "a.tar")
    os.chown(place / "a.tar", UID, UID)
    try:
        done = subprocess.run(
            ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", sys.executable, "-c", AS_USER,
             place / "a.tar", place / "dest"],
            env={"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        dest = place / "dest"
        assert done.stdout.split() == ["entry.device=1", "entry.link_target=1", "entry.owner=6"]
        assert {p.name: stat.S_IMODE(p.lstat().st_mode) for p in dest.iterdir()} == {
            "ro": 0o555, "none": 0, "su": 0o4755, "mine": 0o644,
        }  # fmt: skip
        assert (dest / "ro/more").stat().st_uid == UID
    finally:
        shutil.rmtree(place)
