"""ensure_runtime.sh: who starts it, on what host, beside whose files (reviews 13, 14, 16, 18, 19)."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.shell.ensure import PYTHON, SCRIPT, archive_of, member, script, sha


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return archive_of(tmp_path, member("opt/rt/envs/base/data", data=b"x"))


def bare(*argv: object, **env: str) -> subprocess.CompletedProcess[str]:
    """With these variables alone."""
    given = {"PATH": os.environ["PATH"], "NRL_PYTHON": PYTHON, **env}
    return subprocess.run(["bash", str(SCRIPT), *map(str, argv)], env=given, capture_output=True, text=True, timeout=300)


def test_without_home_and_prefix_nothing_is_installed_below_the_root(archive: Path) -> None:
    done = bare(archive, sha(archive))
    assert done.returncode == 2 and "HOME is not set" in done.stderr


def test_an_empty_prefix_is_a_callers_unset_variable(archive: Path, tmp_path: Path) -> None:
    done = bare(archive, sha(archive), "", HOME=str(tmp_path / "home"))
    assert done.returncode == 2 and "the prefix is empty" in done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("version", ["3.9", "3.8"])
def test_an_older_python_is_refused_by_name(archive: Path, tmp_path: Path, version: str) -> None:
    found = next(Path.home().glob(f".pyenv/versions/{version}*/bin/python3"), None)
    if found is None:
        pytest.skip(f"needs Python {version}")
    done = script(archive, sha(archive), tmp_path / "rt", NRL_PYTHON=str(found))
    assert done.returncode == 2 and "older than 3.10" in done.stderr
    assert not (tmp_path / "rt").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_who_may_not_write_there_can_check_what_is_installed(archive: Path, tmp_path: Path) -> None:
    for place in (tmp_path, *tmp_path.parents):
        if place != Path("/tmp") and place.is_relative_to("/tmp"):
            place.chmod(place.stat().st_mode | 0o055)
    assert script(archive, sha(archive), tmp_path / "rt").returncode == 0
    argv = ["setpriv", "--reuid", "65534", "--clear-groups", "bash", SCRIPT, archive, sha(archive)]
    env = {"PATH": "/usr/bin:/bin"}
    for prefix, status, word in (("rt", 0, "is intact"), ("other", 5, "cannot write beside")):
        done = subprocess.run([*argv, tmp_path / prefix], env=env, capture_output=True, text=True, timeout=300)
        assert (done.returncode, word in done.stderr, "line " in done.stderr) == (status, True, False), done.stderr


def test_a_folder_that_is_called_like_a_failure_and_is_not_ours_stays(archive: Path, tmp_path: Path) -> None:
    (tmp_path / ".rt.failed").mkdir()
    (tmp_path / ".rt.failed/mine").touch()
    assert script(archive, sha(archive), tmp_path / "rt").returncode == 0
    assert (tmp_path / ".rt.failed/mine").exists()


def test_a_failure_beside_somebodys_folder_is_kept_too_and_removed_later(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "in/.rt.failed").mkdir(parents=True)
    (tmp_path / "in/.rt.failed/mine").touch()
    wrong = archive_of(tmp_path / "in", member("opt/rt/envs", tarfile.DIRTYPE), member("../out", data=b"x"))
    wrong = wrong.rename(tmp_path / "wrong.tar.gz")
    assert script(wrong, sha(wrong), tmp_path / "in/rt").returncode == 4
    assert len(list((tmp_path / "in").iterdir())) == 2
    good = archive_of(tmp_path, member("opt/rt/envs/base/data", data=b"x"))
    assert script(good, sha(good), tmp_path / "in/rt").returncode == 0
    assert sorted(p.name for p in (tmp_path / "in").iterdir()) == [".rt.failed", "rt"]


def test_an_interpreter_off_another_place_than_the_shipped_one_is_refused(tmp_path: Path) -> None:
    """It works on the build machine, and on no other."""
    archive = archive_of(
        tmp_path, member("opt/rt/python/lib", data=b""), member("opt/rt/envs/base/bin/python", tarfile.SYMTYPE, PYTHON)
    )
    done = script(archive, sha(archive), tmp_path / "rt")
    assert done.returncode == 3 and "install.interpreter" in done.stderr and "runs off" in done.stderr
