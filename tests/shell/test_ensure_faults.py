"""ensure_runtime.sh where a download is stopped, where nothing locks, and with archives that lie about numbers."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.lab.waits import until
from tests.shell.ensure import PYTHON, SCRIPT, archive_of, fetch, member, script, sha
from tests.shell.hub import Hub

NO_LOCKS = "#include <errno.h>\nint flock(int f, int o) { errno = ENOTSUP; return -1; }\n"


@pytest.fixture
def no_locks(tmp_path: Path) -> str:
    """As Lustre without its flock option."""
    if shutil.which("cc") is None:
        pytest.skip("not installed: cc")
    (tmp_path / "n.c").write_text(NO_LOCKS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "n.so", "n.c"], cwd=tmp_path, check=True)
    return str(tmp_path / "n.so")


def started(hub: Hub, prefix: Path, **env: str) -> subprocess.Popen[str]:
    base = {"PATH": os.environ["PATH"], "NRL_PYTHON": PYTHON, "PROXY": hub.proxy, "CURL_CA_BUNDLE": str(hub.ca)}
    argv = ["bash", str(SCRIPT), hub.url, hashlib.sha256(hub.data).hexdigest(), str(prefix)]
    prefix.parent.mkdir(exist_ok=True)
    return subprocess.Popen(
        argv, env={**base, **env}, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def parts(folder: Path) -> list[Path]:
    return list(folder.glob(".rt.download-*"))


def wait_for_part(folder: Path) -> None:
    until(lambda: any(part.stat().st_size for part in parts(folder)))


def test_the_script_alone_stops_a_download_at_once(hub: Hub, tmp_path: Path) -> None:
    """A job runner's SIGTERM; curl must not go on, and the next start takes what came."""
    hub.faults.hang_at = 5000
    run = started(hub, tmp_path / "in/rt")
    wait_for_part(tmp_path / "in")
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=300)
    assert run.returncode == 143 and "continued next time" in said, said
    hub.faults.hang_at = 0
    done = fetch(hub, tmp_path / "in/rt")
    assert done.returncode == 0 and "continuing at" in done.stderr
    assert [p.name for p in (tmp_path / "in").iterdir()] == ["rt"]


def test_starts_without_locks_do_not_share_a_download(hub: Hub, tmp_path: Path, no_locks: str) -> None:
    hub.faults.hang_at = 5000
    first = started(hub, tmp_path / "in/rt", LD_PRELOAD=no_locks)
    wait_for_part(tmp_path / "in")
    hub.faults.hang_at = 0
    second = fetch(hub, tmp_path / "in/rt", LD_PRELOAD=no_locks)
    assert second.returncode == 0 and "continuing" not in second.stderr, second.stderr
    assert len(parts(tmp_path / "in")) == 1
    os.killpg(first.pid, signal.SIGKILL)  # with its curl, which would wait for more
    first.communicate()


def test_without_locks_what_a_dead_start_left_is_continued(hub: Hub, tmp_path: Path, no_locks: str) -> None:
    hub.faults.hang_at = 5000
    first = started(hub, tmp_path / "in/rt", LD_PRELOAD=no_locks)
    wait_for_part(tmp_path / "in")
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=300)
    hub.faults.hang_at = 0
    done = fetch(hub, tmp_path / "in/rt", LD_PRELOAD=no_locks)
    assert done.returncode == 0 and "continuing at" in done.stderr, done.stderr
    assert [p.name for p in (tmp_path / "in").iterdir()] == ["rt"]


@pytest.mark.parametrize(
    ("record", "status"),
    [
        ({"size": "-5"}, 3), ({"size": "abc"}, 3), ({"size": "1_0"}, 3), ({"size": "9" * 30}, 3), ({"mtime": "nan"}, 3),
        ({"mtime": "1e300"}, 3), ({"mtime": ""}, 3), ({"mtime": "9" * 12 + "9"}, 3), ({"mtime": "-5.5"}, 0),
        ({"path": "opt/rt/envs/" + "d/" * 200 + "x"}, 4), ({"path": "opt/rt/envs/" + "n" * 256}, 4),
    ],
)  # fmt: skip
def test_numbers_and_names_of_an_archive_are_bounded(tmp_path: Path, record: dict[str, str], status: int) -> None:
    """C7-07, C8-07, C5-07: a refusal with a code, at once."""
    info, data = member("opt/rt/envs/x", data=b"x")
    info.pax_headers = record
    (tmp_path / "in").mkdir()
    archive = archive_of(tmp_path, (info, data))
    done = script(archive, sha(archive), tmp_path / "in/rt")
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
    assert status == 0 or "error [" in done.stderr


def test_an_empty_link_is_refused(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, member("opt/rt/envs/l", tarfile.SYMTYPE))
    done = script(archive, sha(archive), tmp_path / "rt")
    assert done.returncode == 3 and "tar.link" in done.stderr


def test_an_archive_that_is_replaced_after_its_digest_was_right_is_refused(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, member("opt/rt/envs/a", data=b"a"))
    digest, other = sha(archive), tmp_path / "other"
    other.write_bytes(gzip.compress(gzip.decompress(archive.read_bytes()).replace(b"envs/a", b"envs/b")))
    text = SCRIPT.read_text()
    between = f"hashed = None if checked else digest(archive, sha); os.replace({str(other)!r}, archive)"
    changed = tmp_path / "ensure.sh"
    changed.write_text(text.replace("hashed = None if checked else digest(archive, sha)", between))
    assert changed.read_text() != text
    done = script(archive, digest, tmp_path / "rt", run_as=changed)
    assert done.returncode == 3 and "archive.changed" in done.stderr and not (tmp_path / "rt").exists()


def test_profiling_is_no_damage(tmp_path: Path) -> None:
    """NeMo RL changes Ray's plugin when NRL_NSYS_WORKER_PATTERNS is set."""
    name = "envs/base/lib/ray/_private/runtime_env/nsight.py"
    archive = archive_of(tmp_path, member(f"opt/rt/{name}", data=b"old"))
    assert script(archive, sha(archive), tmp_path / "rt").returncode == 0
    (tmp_path / "rt" / name).write_bytes(b"another")
    assert script(archive, sha(archive), tmp_path / "rt").returncode == 0
    assert json.loads((tmp_path / "rt/.nrl-install/installed.json").read_text())["sha256"] == sha(archive)
