"""The real ensure_runtime.sh: from files, and from a hub behind TLS and a proxy. Group E and H field reports."""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from tests.chroot.test_pythons import VERSIONS, interpreter
from tests.conftest import Built
from tests.shell.ensure import PYTHON, SCRIPT, archive_of, by_tar, member, script, sha, tree


def test_installs_what_gnu_tar_unpacks(quick: Built, tmp_path: Path) -> None:
    done = script(quick.portable, sha(quick.portable), tmp_path / "rt")
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "rt")), done.stderr
    assert tree(tmp_path / "rt") == by_tar(quick.portable, tmp_path / "tar")
    one, two = (tmp_path / f"rt/envs/{name}/lib/pkg/shared.bin" for name in ("one", "two"))
    assert one.stat().st_ino == two.stat().st_ino
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rt", "tar"]


def test_an_archive_without_members_of_ours_gives_the_same_tree(quick: Built, tmp_path: Path) -> None:
    plain = tmp_path / "plain.tar.gz"
    plain.write_bytes(gzip.compress(gzip.decompress(quick.portable.read_bytes())))
    assert script(plain, sha(plain), tmp_path / "rt").returncode == 0
    assert tree(tmp_path / "rt") == by_tar(quick.portable, tmp_path / "tar")


def test_a_member_that_lies_about_its_length_changes_nothing(quick: Built, tmp_path: Path) -> None:
    data = bytearray(quick.portable.read_bytes())
    at = data.index(b"OB\x04\x00")
    data[at + 4 : at + 8] = (12345).to_bytes(4, "little")
    lie = tmp_path / "lie.tar.gz"
    lie.write_bytes(data)
    done = script(lie, sha(lie), tmp_path / "rt")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "rt") == by_tar(quick.portable, tmp_path / "tar")


def test_wrong_digest_is_refused_before_anything_is_unpacked(quick: Built, tmp_path: Path) -> None:
    done = script(quick.portable, "0" * 64, tmp_path / "rt")
    assert done.returncode == 3 and "blob.digest" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_matching_installation_is_checked_and_kept(quick: Built, tmp_path: Path) -> None:
    for _ in range(2):
        done = script(quick.portable, sha(quick.portable), tmp_path / "rt")
        assert done.returncode == 0
    assert "is intact" in done.stderr


@pytest.mark.parametrize("how", ["content", "mode", "gone", "added", "link", "list"])
def test_a_tampered_installation_is_found(quick: Built, tmp_path: Path, how: str) -> None:
    """Sizes and times are as they were: only the content tells."""
    root = tmp_path / "rt"
    assert script(quick.portable, sha(quick.portable), root).returncode == 0
    file = root / "envs/one/lib/pkg/own.py"
    before = file.stat()
    match how:
        case "content":
            file.write_text(file.read_text().replace("'one'", "'eno'"))
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        case "mode":
            file.chmod(0o666)
        case "gone":
            file.unlink()
        case "added":
            (root / "envs/one/lib/sitecustomize.py").write_text("")
        case "link":
            (root / "envs/one/lib/link.py").unlink()
            (root / "envs/one/lib/link.py").symlink_to("/etc/passwd")
        case "list":
            (root / ".nrl-install/files.json.gz").write_bytes(gzip.compress(b"{}"))
    done = script(quick.portable, sha(quick.portable), root)
    assert done.returncode == 3 and "install.damaged" in done.stderr


def test_files_that_running_writes_are_no_damage(quick: Built, tmp_path: Path) -> None:
    root = tmp_path / "rt"
    assert script(quick.portable, sha(quick.portable), root).returncode == 0
    (root / "envs/one/lib/pkg/__pycache__").mkdir()
    (root / "envs/one/lib/pkg/__pycache__/own.cpython-313.pyc").write_bytes(b"x")
    assert script(quick.portable, sha(quick.portable), root).returncode == 0


@pytest.mark.parametrize("what", ["another archive", "a stranger's folder", "a file", "a link"])
def test_something_else_at_the_prefix_is_left_alone(quick: Built, tmp_path: Path, what: str) -> None:
    root = tmp_path / "rt"
    match what:
        case "another archive":
            other = tmp_path / "other.tar.gz"
            other.write_bytes(gzip.compress(gzip.decompress(quick.portable.read_bytes())))
            assert script(other, sha(other), root).returncode == 0
        case "a stranger's folder":
            root.mkdir()
            (root / "thesis.tex").write_text("mine")
        case "a file":
            root.write_text("mine")
        case "a link":
            (tmp_path / "real").mkdir()
            root.symlink_to("real")
    before = tree(tmp_path)
    done = script(quick.portable, sha(quick.portable), root)
    assert done.returncode == 6 and "install.differs" in done.stderr
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["a b", "a'b", 'a"b', "a$b", "a\tb", "a;b", "ü", "a*"])
def test_odd_prefixes_are_refused_before_work(quick: Built, tmp_path: Path, name: str) -> None:
    """B138: Ray starts workers through a shell without quoting."""
    done = script(quick.portable, sha(quick.portable), tmp_path / name / "rt")
    assert done.returncode == 2 and "install.prefix" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_archive_may_lie_in_an_odd_place(quick: Built, tmp_path: Path) -> None:
    odd = tmp_path / "it's a \"place\" $HOME"
    odd.mkdir()
    shutil.copy(quick.portable, odd / "-r.tar.gz")
    assert script(odd / "-r.tar.gz", sha(quick.portable), tmp_path / "rt").returncode == 0


@pytest.mark.parametrize("how", ["relative", "trailing", "dots", "script by a link", "long"])
def test_the_prefix_does_not_depend_on_how_it_is_said(quick: Built, tmp_path: Path, how: str) -> None:
    """B146, B138."""
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to(SCRIPT)
    run_as, prefix, wanted = SCRIPT, "rt", tmp_path / "d/rt"
    match how:
        case "trailing":
            prefix = "rt///"
        case "dots":
            prefix = "../d/./x/../rt"
        case "script by a link":
            run_as = Path("../link")
        case "long":
            prefix = "x" * max(1, min(90, 195 - len(str(tmp_path))))  # 200 bytes at most in all
            wanted = tmp_path / "d" / prefix
    done = script(quick.portable, sha(quick.portable), prefix, cwd=tmp_path / "d", run_as=run_as)
    assert done.stdout.strip() == str(wanted) and done.returncode == 0, done.stderr


def test_default_prefix_and_its_variable(quick: Built, tmp_path: Path) -> None:
    digest = sha(quick.portable)
    assert script(quick.portable, digest, NRL_RUNTIME_PREFIX=str(tmp_path / "v")).stdout.strip() == str(tmp_path / "v")
    done = script(quick.portable, digest, HOME=str(tmp_path / "h"))
    assert done.stdout.strip() == str(tmp_path / "h/.local/share/nemo-rl-v070-b200")


def test_eight_at_once_give_one_tree(quick: Built, tmp_path: Path) -> None:
    """B213, B215."""
    argv = ["bash", str(SCRIPT), str(quick.portable), sha(quick.portable), str(tmp_path / "rt")]
    env = {"PATH": os.environ["PATH"], "NRL_PYTHON": PYTHON}
    runs = [subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in range(8)]
    errors = [run.communicate(timeout=300)[1] for run in runs]
    assert [run.returncode for run in runs] == [0] * 8, errors
    assert sum(b"installed in" in e for e in errors) == 1 and sum(b"is intact" in e for e in errors) == 7
    assert [p.name for p in tmp_path.iterdir()] == ["rt"]


def test_killed_midway_leaves_no_marker_on_a_part(quick: Built, tmp_path: Path) -> None:
    """B214: at whatever moment the first is killed, a second one ends with the whole tree."""
    argv = ["bash", str(SCRIPT), str(quick.portable), sha(quick.portable), str(tmp_path / "rt")]
    env = {"PATH": os.environ["PATH"], "NRL_PYTHON": PYTHON}
    expected = by_tar(quick.portable, tmp_path / "tar")
    start = time.monotonic()
    assert script(quick.portable, sha(quick.portable), tmp_path / "rt").returncode == 0
    whole = time.monotonic() - start
    shutil.rmtree(tmp_path / "rt")
    for share in (0.3, 0.45, 0.6, 0.75, 0.9):
        run = subprocess.Popen(argv, env=env, start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            run.wait(share * whole)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, 9)
            run.wait()
        assert not (tmp_path / "rt").exists() or tree(tmp_path / "rt") == expected
        assert script(quick.portable, sha(quick.portable), tmp_path / "rt").returncode == 0
        assert tree(tmp_path / "rt") == expected
        shutil.rmtree(tmp_path / "rt")


def test_a_full_disk_is_said_before_work(quick: Built, tmp_path: Path, needs: object) -> None:
    """B056."""
    needs("mount", root=True)  # type: ignore[operator]
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        done = script(quick.portable, sha(quick.portable), disk / "rt")
        assert done.returncode == 5 and "io.space" in done.stderr and "are free" in done.stderr
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_with_an_empty_environment_only_the_prefix_must_be_said(quick: Built, tmp_path: Path) -> None:
    """B057: sudo and batch systems drop TMPDIR and HOME; staging lies beside the prefix, and needs neither."""
    words = ["env", "-i", "bash", str(SCRIPT), str(quick.portable), sha(quick.portable)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "HOME is not set" in done.stderr
    done = subprocess.run([*words, str(tmp_path / "rt")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and tree(tmp_path / "rt") == by_tar(quick.portable, tmp_path / "tar"), done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_b129_every_python_gives_the_same_tree(quick: Built, tmp_path: Path, version: str) -> None:
    done = script(quick.portable, sha(quick.portable), tmp_path / "rt", NRL_PYTHON=interpreter(version))
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "rt") == by_tar(quick.portable, tmp_path / "tar")


@pytest.mark.parametrize(
    ("members", "status"),
    [
        ([member("opt/rt/envs", tarfile.DIRTYPE), member("../out", data=b"x")], 4),
        ([member("opt/rt/envs", tarfile.SYMTYPE, "/tmp"), member("opt/rt/envs/x", data=b"x")], 4),
        ([member("opt/rt/envs/n", tarfile.CHRTYPE)], 4),
        ([member("opt/rt/envs/n", tarfile.LNKTYPE, "etc/passwd")], 3),
        ([member("opt/rt/data", data=b"x")], 3),
        ([member("opt/rt/envs/a", data=b"x"), member("opt/rt/envs/a", data=b"y")], 3),
    ],
)
def test_a_wrong_archive_is_refused_and_kept_for_diagnosis(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], status: int
) -> None:
    (tmp_path / "in").mkdir()
    archive = archive_of(tmp_path, *members)
    done = script(archive, sha(archive), tmp_path / "in/rt")
    assert done.returncode == status, done.stderr
    assert [p.name for p in (tmp_path / "in").iterdir()] == [".rt.failed"]
    assert not (tmp_path / "out").exists()


def test_folders_without_write_permission(tmp_path: Path) -> None:
    """B054: an ordinary user unpacks them too, and they end as they were."""
    folder = member("opt/rt/envs/x", tarfile.DIRTYPE)
    folder[0].mode = 0o555
    archive = archive_of(tmp_path, folder, member("opt/rt/envs/x/f", data=b"x"))
    user = ["setpriv", "--reuid", "1000", "--clear-groups"] if os.geteuid() == 0 else []
    target = tmp_path / "home"
    target.mkdir()
    if user:
        os.chown(target, 1000, -1)
        for place in (tmp_path, *tmp_path.parents):
            if place != Path("/tmp") and place.is_relative_to("/tmp"):
                place.chmod(place.stat().st_mode | 0o055)
    argv = [*user, "bash", str(SCRIPT), str(archive), sha(archive), str(target / "rt")]
    done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE((target / "rt/envs/x").stat().st_mode) == 0o555


def test_an_interpreter_that_does_not_start_is_found_at_once(tmp_path: Path) -> None:
    """B152."""
    archive = archive_of(tmp_path, member("opt/rt/envs/base/bin/python", tarfile.SYMTYPE, "../../../python/bin/python"))
    done = script(archive, sha(archive), tmp_path / "rt")
    assert done.returncode == 3 and "install.interpreter" in done.stderr
    assert not (tmp_path / "rt").exists()
