"""``unpack``: every form of archive, every broken byte, and a destination that is whole or as it was."""

from __future__ import annotations

import ast
import gzip
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zstandard

from oci_builder.model.errors import ConflictError, OciBuilderError
from oci_builder.model.limits import Limits
from oci_builder.unpack import UnpackOptions, unpack_image
from tests.lab import tarlang as t
from tests.lab.archives import Lab, dump, entry, files, sha, tar, write
from tests.lab.oracle import differences, tree

ROOT = Path(__file__).parents[1]
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def failure(archive: Path, dest: Path, **options: object) -> str:
    """The code of the refusal; nothing of the attempt may be left."""
    with pytest.raises(OciBuilderError) as error:
        unpack_image(archive, dest, UnpackOptions(**options))  # type: ignore[arg-type]
    assert not [name for name in os.listdir(dest.parent) if ".partial-" in name]
    return error.value.code


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


# -- forms -------------------------------------------------------------------------------------------------------------

PLAIN = {"a": b"alpha" * 300, "b": b"beta"}


@pytest.mark.parametrize("pack", ["identity", "gzip", "zstd"])
@pytest.mark.parametrize("compress", [False, True], ids=["tar", "tar.gz"])
@pytest.mark.parametrize("form", ["oci", "docker", "reversed"])
def test_forms(tmp_path: Path, pack: str, compress: bool, form: str) -> None:
    """Members in any order, as a stream or in place, give the same tree."""
    lab = Lab(pack=pack)
    members = lab.docker() if form == "docker" else lab.oci()
    if form == "reversed":
        members = dict(reversed(members.items()))
    unpack_image(write(tmp_path / "a", members, compress=compress), tmp_path / "dest")
    assert content(tmp_path / "dest") == PLAIN


def test_legacy_docker_save_with_a_linked_layer(tmp_path: Path) -> None:
    layer = files(a=b"1")
    archive = tmp_path / "a.tar"
    archive.write_bytes(tar(*Lab(layers=[layer, files(b=b"2"), layer], pack="identity").legacy()))
    for path in (archive, tmp_path / "a.tgz"):
        if path != archive:
            path.write_bytes(gzip.compress(archive.read_bytes()))
        unpack_image(path, tmp_path / path.name.replace(".", "-"))
        assert content(tmp_path / path.name.replace(".", "-")) == {"a": b"1", "b": b"2"}


@pytest.mark.parametrize("compress", [False, True])
def test_b005_a_layer_that_is_there_twice(tmp_path: Path, compress: bool) -> None:
    layer = files(a=b"1")
    lab = Lab(layers=[layer, files(a=b"2", b=b"3"), layer])
    unpack_image(write(tmp_path / "a", lab.oci(), compress=compress), tmp_path / "dest")
    assert content(tmp_path / "dest") == {"a": b"1", "b": b"3"}


def test_b019_through_a_link_and_zstd_outside(tmp_path: Path) -> None:
    archive = write(tmp_path / "a", Lab().oci())
    (tmp_path / "z").write_bytes(zstandard.compress(archive.read_bytes()))
    (tmp_path / "link").symlink_to("z")
    unpack_image(tmp_path / "link", tmp_path / "dest")
    assert content(tmp_path / "dest") == PLAIN


def test_threads_make_no_difference(tmp_path: Path) -> None:
    rng = random.Random(1)
    layers = [tar(*(entry(f"d{n % 7}/f{n}", rng.randbytes(rng.randrange(9000)), mtime=n) for n in range(300)))] * 2
    archive = write(tmp_path / "a", Lab(layers=[layers[0], files(x=b"1")]).oci())
    for threads in (1, 2, 5):
        unpack_image(archive, tmp_path / str(threads), UnpackOptions(threads=threads))
    first = tree(tmp_path / "1")
    assert not differences(first, tree(tmp_path / "2"))
    assert not differences(first, tree(tmp_path / "5"))


# -- bytes that are not what they claim --------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pack", ["identity", "gzip", "zstd"])
@pytest.mark.parametrize(("case", "change", "code"), [
    ("C2-01", lambda b: b[:-30] + bytes([b[-30] ^ 1]) + b[-29:], "blob.digest"),
    ("C2-01b", lambda b: b[:700] + bytes([b[700] ^ 1]) + b[701:], "blob.digest"),
    ("C2-02", lambda b: b + b"\0", "blob.size"),
    ("C2-02b", lambda b: b[:-1], "blob.size"),
])  # fmt: skip
def test_blobs_that_differ(tmp_path: Path, threads: int, pack: str, case: str, change, code: str) -> None:  # type: ignore[no-untyped-def]
    layer = files(a=random.Random(0).randbytes(3000))
    lab = Lab(layers=[layer], pack=pack)
    name = "blobs/sha256/" + sha(lab.blobs()[0][0][1])
    lab.edit_members = lambda members: members | {name: change(members[name])}
    assert failure(write(tmp_path / "a", lab.oci()), tmp_path / "dest", threads=threads) == code
    assert not (tmp_path / "dest").exists()


def test_c3_10_a_wrong_diff_id(tmp_path: Path) -> None:
    lab = Lab()
    lab.edit_config = lambda c: c | {"rootfs": {"type": "layers", "diff_ids": c["rootfs"]["diff_ids"][::-1]}}
    assert failure(write(tmp_path / "a", lab.oci()), tmp_path / "dest") == "layer.diff_id"


def test_c2_06_a_tampered_trailer_behind_the_tar(tmp_path: Path) -> None:
    """Bytes that no entry needs count too: zero padding after the end marker, changed in its length."""
    other = gzip.compress(files(a=b"1") + bytes(8704))
    lab = Lab(layers=[files(a=b"1") + bytes(9216)], edit_layer=lambda _n, _b: other)
    assert failure(write(tmp_path / "a", lab.oci()), tmp_path / "dest") == "layer.diff_id"


@pytest.mark.parametrize("compress", [False, True])
def test_c10_09_an_archive_cut_at_every_member(tmp_path: Path, compress: bool) -> None:
    whole = write(tmp_path / "a", Lab().oci()).read_bytes()
    for cut in range(512, len(whole) - 512, 512):
        part = whole[:cut]
        (tmp_path / "cut").write_bytes(gzip.compress(part) if compress else part)
        assert failure(tmp_path / "cut", tmp_path / "dest") in ("tar.truncated", "tar.trailing")
        assert not (tmp_path / "dest").exists()


def test_c10_09_an_outer_gzip_that_is_cut(tmp_path: Path) -> None:
    whole = gzip.compress(write(tmp_path / "a", Lab().oci()).read_bytes())
    for cut in range(20, len(whole), 97):
        (tmp_path / "cut").write_bytes(whole[:cut])
        assert failure(tmp_path / "cut", tmp_path / "dest") == "gzip.truncated"


@pytest.mark.parametrize(("case", "change", "code"), [
    ("C10-01", lambda m: {"x": b""}, "archive.missing"),
    ("C10-04", None, "archive.duplicate"),
    ("C3-17a", lambda m: m | {"oci-layout": dump({"imageLayoutVersion": "9"})}, "layout.version"),
    ("C3-18", lambda m: {k: v for k, v in m.items() if k != max(m, key=lambda n: len(m[n]))}, "archive.missing"),
    ("B044", lambda m: {"hello.txt": b"hi"}, "archive.missing"),
])  # fmt: skip
def test_archives_that_are_no_image(tmp_path: Path, case: str, change, code: str) -> None:  # type: ignore[no-untyped-def]
    members = Lab().oci()
    path = tmp_path / "a"
    if change is None:
        path.write_bytes(tar(*(entry(n, d) for n, d in [*members.items(), ("index.json", members["index.json"])])))
    else:
        write(path, change(members))
    assert failure(path, tmp_path / "dest") == code


def test_c2_10_a_layout_blob_that_is_a_link_out(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    for name, data in Lab().oci().items():
        (layout / name).parent.mkdir(parents=True, exist_ok=True)
        (layout / name).write_bytes(data)
    blob = max((layout / "blobs/sha256").iterdir(), key=lambda p: p.stat().st_size)
    shutil.move(blob, tmp_path / "outside")
    blob.symlink_to(tmp_path / "outside")
    assert failure(layout, tmp_path / "dest") == "archive.member"


def test_c9_01_a_bomb_stops_before_the_disk_fills(tmp_path: Path) -> None:
    size = 64 << 20
    layer = t.tar(t.header(b"zeros", size=size) + bytes(size))
    limits = Limits(layer_size=8 << 20)
    archive = write(tmp_path / "a", Lab(layers=[layer]).oci())
    assert failure(archive, tmp_path / "dest", limits=limits) == "limit.layer"
    limits = Limits(ratio_floor=8 << 20)
    assert failure(archive, tmp_path / "dest", limits=limits) == "limit.ratio"


def test_no_such_archive(tmp_path: Path) -> None:
    assert failure(tmp_path / "no", tmp_path / "dest") == "spec.path"


# -- the destination ---------------------------------------------------------------------------------------------------


def test_an_empty_folder_is_filled_and_a_full_one_refused(tmp_path: Path) -> None:
    archive = write(tmp_path / "a", Lab().oci())
    (tmp_path / "dest").mkdir(mode=0o700)
    unpack_image(archive, tmp_path / "dest")
    before = tree(tmp_path / "dest")
    assert failure(archive, tmp_path / "dest") == "unpack.not_empty"
    assert not differences(before, tree(tmp_path / "dest"))
    assert failure(archive, archive) == "unpack.not_empty"


def test_parents_are_made(tmp_path: Path) -> None:
    unpack_image(write(tmp_path / "a", Lab().oci()), tmp_path / "new/er/dest")
    assert content(tmp_path / "new/er/dest") == PLAIN


BAD = t.tar(t.file(b"good", b"1"), t.folder(b"none", mode=0), t.header(b"x", kind=b"Z"))


def test_a_failure_leaves_an_empty_folder_empty(tmp_path: Path) -> None:
    (tmp_path / "dest").mkdir()
    archive = write(tmp_path / "a", Lab(layers=[files(a=b"1"), BAD]).oci())
    assert failure(archive, tmp_path / "dest") == "entry.type"
    assert os.listdir(tmp_path / "dest") == []


@root_only
def test_a_mount_point_is_filled_inside(tmp_path: Path) -> None:
    good = write(tmp_path / "a", Lab(layers=[t.tar(t.header(b"./", kind=b"5", mode=0o750), t.file(b"f", b"1"))]).oci())
    bad = write(tmp_path / "bad", Lab(layers=[BAD]).oci())
    with tmpfs(tmp_path / "dest", "size=8m") as dest:
        assert failure(bad, dest) == "entry.type"
        assert os.listdir(dest) == []
        unpack_image(good, dest)
        assert os.listdir(dest) == ["f"]
        assert dest.stat().st_mode & 0o7777 == 0o750


@root_only
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_full_disk(tmp_path: Path, inside: bool, compress: bool) -> None:
    archive = write(tmp_path / "a", Lab(layers=[files(a=os.urandom(3 << 20))]).oci(), compress=compress)
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        assert failure(archive, disk if inside else disk / "dest") == "io.space"
        assert os.listdir(disk) == []


@root_only
def test_a_read_only_place(tmp_path: Path) -> None:
    archive = write(tmp_path / "a", Lab().oci())
    with tmpfs(tmp_path / "disk", "size=1m,ro") as disk:
        assert failure(archive, disk / "dest") == "io.readonly"


@root_only
def test_no_inodes_left(tmp_path: Path) -> None:
    archive = write(tmp_path / "a", Lab(layers=[files(**{f"f{n}": b"" for n in range(50)})]).oci())
    with tmpfs(tmp_path / "disk", "size=1m,nr_inodes=20") as disk:
        assert failure(archive, disk / "dest") == "io.space"
        assert os.listdir(disk) == []


@root_only
def test_b199_removal_stops_at_a_mount(tmp_path: Path) -> None:
    """A dead run's folder with something mounted in it is left alone, mount and all."""
    archive = write(tmp_path / "a", Lab().oci())
    stale = tmp_path / ".dest.partial-0123"
    (stale / "sub").mkdir(parents=True)
    with tmpfs(stale / "sub", "size=1m") as mounted:
        (mounted / "precious").write_text("x")
        unpack_image(archive, tmp_path / "dest")
        assert (mounted / "precious").read_text() == "x"


# Stands still after as many files as it is told to write, if it is told a number.
SLOW = """
import sys, time
from pathlib import Path
from oci_builder.unpack import unpack_image
from oci_builder.rootfs import apply
write, left = apply._write, int(sys.argv[3])
def slow(fd, pieces):
    global left
    write(fd, pieces)
    left -= 1
    if not left:
        print("held", flush=True)
        time.sleep(3600)
    time.sleep(0.01)
apply._write = slow
unpack_image(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_kill_9_leaves_nothing_that_the_next_run_does_not_remove(tmp_path: Path) -> None:
    archive = write(tmp_path / "a", Lab(layers=[files(**{f"f{n}": b"x" for n in range(100)})]).oci())
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    rng = random.Random(3)
    for _ in range(5):
        command = [sys.executable, "-c", SLOW, archive, tmp_path / "dest", str(rng.randint(1, 100))]
        child = subprocess.Popen(command, env=env, stdout=-1)
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert not (tmp_path / "dest").exists()
    unpack_image(archive, tmp_path / "dest")
    assert len(content(tmp_path / "dest")) == 100
    assert sorted(os.listdir(tmp_path)) == ["a", "dest"]


def test_two_at_once_one_wins(tmp_path: Path) -> None:
    archive = write(tmp_path / "a", Lab(layers=[files(**{f"f{n}": b"x" for n in range(30)})]).oci())
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", SLOW, archive, tmp_path / "dest", "0"]
    children = [subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    ends = [child.communicate()[1] for child in children]
    assert sorted(child.returncode for child in children) == [0, 1]
    assert "unpack.not_empty" in "".join(ends)
    assert len(content(tmp_path / "dest")) == 30
    assert sorted(os.listdir(tmp_path)) == ["a", "dest"]


def test_the_report(tmp_path: Path) -> None:
    lab = Lab(layers=[t.tar(t.file(b"/abs", b"12345"), t.symlink(b"l", b"abs"))])
    done = unpack_image(write(tmp_path / "a", lab.oci()), tmp_path / "dest").to_json()
    assert done["summary"] == {"layers": 1, "entries": 2, "bytes": 5, "file": 1, "symlink": 1}
    assert [w["code"] for w in done["warnings"]] == ["path.absolute"]
    assert done["config"] == "sha256:" + sha(lab.blobs()[1])


def test_a_link_to_nothing_is_no_destination(tmp_path: Path) -> None:
    """What it points at is not made behind the user's back."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    archive = write(tmp_path / "a.tar", Lab().oci())
    with pytest.raises(ConflictError) as error:
        unpack_image(archive, tmp_path / "link")
    assert error.value.code == "unpack.not_empty" and not (tmp_path / "nowhere").exists()


@root_only
def test_b129_links_out_of_the_root_and_setuid_are_content(tmp_path: Path) -> None:
    """What Python's own extraction filters refuse or change, and differently from version to version."""
    layer = tar(
        entry("usr/bin/su", b"#!", mode=0o4755, uid=0, gid=7),
        entry("etc/alternatives/su", type=tarfile.SYMTYPE, linkname="/usr/bin/su"),
        entry("etc/up", type=tarfile.SYMTYPE, linkname="../../../usr/bin/su"),
        entry("var/group", type=tarfile.DIRTYPE, mode=0o2775, gid=7),
    )
    unpack_image(write(tmp_path / "a.tar", Lab(layers=[layer]).oci()), tmp_path / "root")
    su = (tmp_path / "root/usr/bin/su").lstat()
    assert (su.st_mode & 0o7777, su.st_gid) == (0o4755, 7)
    assert (tmp_path / "root/var/group").stat().st_mode & 0o7777 == 0o2775
    assert os.readlink(tmp_path / "root/etc/alternatives/su") == "/usr/bin/su"
    assert os.readlink(tmp_path / "root/etc/up") == "../../../usr/bin/su"


def test_b129_nothing_on_the_way_asks_pythons_tar() -> None:
    """So that the tree is the same whatever filter a Python has by default."""
    folders = ("rootfs", "wire", "judge", "transports", "store")
    paths = [p for folder in folders for p in (ROOT / "oci_builder" / folder).rglob("*.py")]
    paths += [ROOT / "oci_builder/unpack.py", *(ROOT / "layers/files").rglob("*.py"), *(ROOT / "chroot_exec").rglob("*.py")]
    named = {p.name for p in paths for node in ast.walk(ast.parse(p.read_bytes())) if _imports_tarfile(node)}
    assert len(paths) > 50 and named == set()


def _imports_tarfile(node: ast.AST) -> bool:
    names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    called = isinstance(node, ast.Attribute) and node.attr == "unpack_archive"
    return called or "tarfile" in names


def test_few_open_files_are_enough_for_deep_folders(tmp_path: Path) -> None:
    """``ulimit -n 200``: the folders that are kept open leave room for the way to the next one, and for its removal."""
    names = [b"/".join([b"p"] * depth) + b"/f" for depth in range(1, 119)]
    deep = t.tar(*(t.pax(t.record(b"path", name)) + t.file(b"f", b"x") for name in names))
    archive = write(tmp_path / "a.tar", Lab(layers=[deep, t.tar(t.file(b".wh.p"), t.file(b"g"))]).oci())
    words = [sys.executable, "-c", "from oci_builder.cli import main; main()", "unpack", archive, tmp_path / "root"]
    done = subprocess.run(
        words, capture_output=True, cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path / "root") == ["g"]
