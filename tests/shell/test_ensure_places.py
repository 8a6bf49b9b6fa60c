"""ensure_runtime.sh in places that others share, under shells and locales of all kinds, with archives of installations."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.shell.ensure import PYTHON, SCRIPT, archive_of, fetch, member, script, sha
from tests.shell.hub import Hub

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
NOBODY, SOMEBODY = 65534, 12345
# More shells to try, separated by colons: Ubuntu 22.04 has Bash 5.1.
BASHES = ["bash", *filter(None, os.environ.get("OCI_BUILDER_BASHES", "").split(":"))]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return archive_of(tmp_path, member("opt/rt/envs/base/data", data=b"x"), member("opt/rt/envs/base/é", data=b"x"))


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """As /tmp: all may write, and remove only what is their own."""
    for place in (tmp_path, *tmp_path.parents):
        if place != Path("/tmp") and place.is_relative_to("/tmp"):
            place.chmod(place.stat().st_mode | 0o055)
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


def by(user: int, *argv: object, **env: str) -> subprocess.CompletedProcess[str]:
    words = ["setpriv", "--reuid", str(user), "--clear-groups", *map(str, argv)]
    given = {"PATH": "/usr/bin:/bin", **env}
    return subprocess.run(words, env=given, cwd="/", capture_output=True, text=True, timeout=300, check=False)


@ROOT_ONLY
def test_what_another_user_left_is_no_obstacle(archive: Path, shared: Path) -> None:
    """He was killed, or his start failed: neither his lock nor his failure can be removed by the next."""
    host = os.uname().nodename
    left = f"mkdir {shared}/.rt.failed {shared}/.rt.staging-{host}-7; touch {shared}/.rt.failed/.nrl-failed {shared}/.rt.lock"
    assert by(NOBODY, "sh", "-c", f"umask 022; {left}").returncode == 0
    done = by(SOMEBODY, "bash", SCRIPT, archive, sha(archive), shared / "rt")
    assert done.returncode == 0 and "whoever owns it" in done.stderr, done.stderr
    assert (shared / "rt/envs/base/data").exists() and (shared / ".rt.failed").exists()


@ROOT_ONLY
def test_a_folder_that_cannot_be_made_is_read_only(archive: Path, shared: Path) -> None:
    shared.chmod(0o755)
    done = by(SOMEBODY, "bash", SCRIPT, archive, sha(archive), shared / "new/rt")
    assert done.returncode == 5 and "[io.readonly]" in done.stderr and f"{shared}/new" in done.stderr, done.stderr


@ROOT_ONLY
def test_another_users_start_is_waited_for(archive: Path, shared: Path) -> None:
    holder = subprocess.Popen(
        ["setpriv", "--reuid", str(NOBODY), "--clear-groups", "flock", shared / ".rt.lock", "sh", "-c", "echo; read x"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout and holder.stdout.readline() == "\n"
    done = by(SOMEBODY, "bash", SCRIPT, archive, sha(archive), shared / "rt", NRL_LOCK_TIMEOUT="0.3")
    assert done.returncode == 5 and "install.lock" in done.stderr, done.stderr
    holder.communicate("\n")
    assert by(SOMEBODY, "bash", SCRIPT, archive, sha(archive), shared / "rt").returncode == 0


@ROOT_ONLY
@pytest.mark.parametrize("what", ["file", "symlink", "hard link"])
def test_a_download_that_another_user_began_is_not_trusted(hub: Hub, shared: Path, what: str) -> None:
    """He could change it between its check and its use. Root may remove it; others say so and end."""
    digest = hashlib.sha256(hub.data).hexdigest()
    part, victim = shared / f".rt.download-{digest[:16]}", shared.parent / "victim"
    victim.write_bytes(hub.data[:100])
    match what:
        case "file":
            part.write_bytes(hub.data[:100])
            os.chown(part, NOBODY, NOBODY)
        case "symlink":
            part.symlink_to(victim)
        case "hard link":
            os.link(victim, part)
    for place in (hub.ca, *hub.ca.parents):
        if place != Path("/tmp") and place.is_relative_to("/tmp"):
            place.chmod(place.stat().st_mode | 0o055)
    env = {"PROXY": hub.proxy, "CURL_CA_BUNDLE": str(hub.ca), "NRL_RETRY_SECONDS": "0"}
    done = by(SOMEBODY, "bash", SCRIPT, hub.url, digest, shared / "rt", **env)
    assert done.returncode == 6 and "somebody else's" in done.stderr, done.stderr
    done = fetch(hub, shared / "rt")
    assert done.returncode == 0 and "continuing" not in done.stderr, done.stderr
    assert victim.read_bytes() == hub.data[:100]


def test_a_full_disk_ends_a_download_at_once(hub: Hub, tmp_path: Path) -> None:
    """No attempt after it has more room."""
    text = SCRIPT.read_text()
    changed = tmp_path / "ensure.sh"
    changed.write_text(text.replace("free = found.f_bavail * found.f_frsize", "free = 5"))
    env = {"PROXY": hub.proxy, "CURL_CA_BUNDLE": str(hub.ca)}
    done = script(hub.url, hashlib.sha256(hub.data).hexdigest(), tmp_path / "in/rt", run_as=changed, **env)
    assert done.returncode == 5 and done.stderr.count("io.space") == 1 and "attempt" not in done.stderr, done.stderr


def test_an_archive_of_an_installation_is_refused_by_name(tmp_path: Path) -> None:
    archive = archive_of(
        tmp_path, member("opt/rt/envs/base/data", data=b"x"), member("opt/rt/.nrl-install/installed.json", data=b"{}")
    )
    done = script(archive, sha(archive), tmp_path / "rt")
    assert done.returncode == 3 and "install.archive" in done.stderr and "made of an installation" in done.stderr


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.REGTYPE])
def test_the_mark_of_a_failure_is_written_through_no_link(tmp_path: Path, kind: bytes) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    archive = archive_of(tmp_path, member(".nrl-failed", kind, str(victim)), member("../out", data=b"x"))
    (tmp_path / "in").mkdir()
    assert script(archive, sha(archive), tmp_path / "in/rt").returncode == 4
    assert victim.read_text() == "keep"
    mark = tmp_path / "in/.rt.failed/.nrl-failed"
    assert mark.is_file() and not mark.is_symlink() and "the next start" in mark.read_text()


@ROOT_ONLY
def test_a_place_where_nothing_may_start_is_refused_before_work(tmp_path: Path) -> None:
    place = tmp_path / "noexec"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec,size=1m", "none", place], check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        archive = archive_of(tmp_path, member("opt/rt/envs/base/data", data=b"x"))
        done = script(archive, sha(archive), place / "rt")
        assert done.returncode == 2 and "noexec" in done.stderr and list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", place], check=True)


def test_two_slashes_in_front_are_one(archive: Path, tmp_path: Path) -> None:
    """All nodes must name the same prefix."""
    assert script(archive, sha(archive), f"/{tmp_path}/rt").stdout == f"{tmp_path}/rt\n"
    assert json.loads((tmp_path / "rt/.nrl-install/installed.json").read_text())["prefix"] == f"{tmp_path}/rt"


def test_a_name_too_long_for_the_files_beside_it_is_refused_before_work(archive: Path, tmp_path: Path) -> None:
    changed = tmp_path / "ensure.sh"
    changed.write_text(SCRIPT.read_text().replace("os.uname().nodename}-{1 << 22}", "'h' * 64}-{1 << 22}"))
    for length, status in ((max(1, min(60, 195 - len(str(tmp_path)))), 0), (165, 2)):
        done = script(archive, sha(archive), f"/var/tmp/{'x' * length}" if status else tmp_path / ("x" * length), run_as=changed)
        assert done.returncode == status, done.stderr
    assert "bytes too long" in done.stderr


@pytest.mark.parametrize("shell", [["dash"], ["busybox", "sh"], ["mksh"]])
def test_another_shell_says_that_it_is_none(archive: Path, tmp_path: Path, shell: list[str]) -> None:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"not installed: {shell[0]}")
    done = subprocess.run([*shell, SCRIPT, archive, sha(archive), tmp_path / "rt"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines() == [
        "ensure_runtime: error [install.usage]: this is a script for Bash: bash ensure_runtime.sh ..."
    ]


@pytest.mark.parametrize("shell", BASHES)
@pytest.mark.parametrize(
    "given",
    [{"SHELLOPTS": "errexit:noglob:nounset:noclobber:pipefail"}, {"BASHOPTS": "failglob:nocasematch"},
     {"POSIXLY_CORRECT": "1"}, {"HOSTNAME": "a/b c"}],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_what_a_caller_exported_does_not_matter(archive: Path, tmp_path: Path, shell: str, given: dict[str, str]) -> None:
    env = {"PATH": os.environ["PATH"], "NRL_PYTHON": PYTHON, **given}
    for word in ("installed in", "is intact"):
        argv = [shell, SCRIPT, archive, sha(archive), tmp_path / "rt"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0 and word in done.stderr, done.stderr


def test_its_own_settings_do_not_reach_what_it_starts(archive: Path, tmp_path: Path) -> None:
    """A python3 that is a shell script, as pyenv's: SHELLOPTS is exported already."""
    shim = tmp_path / "python3"
    shim.write_text(f'#!/usr/bin/env bash\n[ -z "$NOT_SET" ] && exec {PYTHON} "$@"\n')
    shim.chmod(0o755)
    done = script(archive, sha(archive), tmp_path / "rt", NRL_PYTHON=str(shim), SHELLOPTS="nounset")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shell", BASHES)
def test_downloads_in_every_bash(hub: Hub, tmp_path: Path, shell: str) -> None:
    hub.faults.drops, hub.faults.drop_at = 1, 3000
    env = {"PROXY": hub.proxy, "CURL_CA_BUNDLE": str(hub.ca), "NRL_RETRY_SECONDS": "0", "NRL_PYTHON": PYTHON}
    argv = [shell, SCRIPT, hub.url, hashlib.sha256(hub.data).hexdigest(), tmp_path / "rt"]
    done = subprocess.run(argv, env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "continuing at" in done.stderr, done.stderr


def test_the_same_names_whatever_the_locale(archive: Path, tmp_path: Path) -> None:
    """An installation of a UTF-8 shell is checked in one of Latin 1."""
    if shutil.which("localedef") is None:
        pytest.skip("not installed: localedef")
    made = subprocess.run(["localedef", "-i", "de_DE", "-f", "ISO-8859-1", tmp_path / "de"], capture_output=True)
    if not (tmp_path / "de/LC_CTYPE").exists():
        pytest.skip(f"localedef makes none: {made.stderr!r}")
    for language in ("C.UTF-8", "de", "C"):
        done = script(archive, sha(archive), tmp_path / "rt", LOCPATH=str(tmp_path), LC_ALL=language)
        assert done.returncode == 0, done.stderr


def test_all_that_a_host_lacks_is_named_at_once(archive: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "gzip"):
        (tools / name).symlink_to(shutil.which(name) or "")
    argv = ["bash", SCRIPT, archive, sha(archive), tmp_path / "rt"]
    done = subprocess.run(argv, env={"PATH": str(tools)}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.strip().endswith("this host has no python3, tar, sha256sum")


def test_a_python_that_does_not_start_is_not_called_old(archive: Path, tmp_path: Path) -> None:
    done = script(archive, sha(archive), tmp_path / "rt", NRL_PYTHON="false")
    assert done.returncode == 2 and "does not start" in done.stderr and "older" not in done.stderr


def test_it_is_installed_where_nobody_listens(archive: Path, tmp_path: Path) -> None:
    """A daemon's start, without standard streams."""
    argv = ["bash", "-c", 'exec <&- >&- 2>&-; exec bash "$@"', "-", SCRIPT, archive, sha(archive), tmp_path / "rt"]
    for _ in range(2):
        done = subprocess.run(argv, env={"PATH": os.environ["PATH"], "NRL_PYTHON": PYTHON}, timeout=300, check=False)
        assert done.returncode == 0 and (tmp_path / "rt/envs/base/data").exists()
