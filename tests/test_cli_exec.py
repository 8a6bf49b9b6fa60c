"""``exec`` and ``verify --exec`` from the outside: folders, signals while an image is staged, odd streams, receipts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oci_builder.execution.staging import is_tree
from tests.chroot.lab import tiny_root

MAIN = "from oci_builder.cli import main; main()"
OK = [{"name": "good", "argv": ["/bin/sh", "-c", "exit 0"]}]
BAD = [{"name": "bad", "argv": ["/bin/sh", "-c", "exit 3"]}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if subprocess.run(["unshare", "-mpf", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    return tiny_root(tmp_path_factory.mktemp("exec") / "root")


def run(cache: Path, *words: str | Path, program: str = MAIN, shell: str = 'exec "$@"') -> subprocess.CompletedProcess[str]:
    """The command line, started by a line of shell."""
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", program, *map(str, words)]
    environment = {**os.environ, "OCI_BUILDER_CACHE": str(cache)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def checks(folder: Path, value: object) -> Path:
    path = folder / "checks.json"
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(("listed", "status", "outcome"), [(OK, 0, "pass"), (BAD, 1, "fail")])
def test_a_folder_s_checks_run_and_nothing_is_said_of_archives(
    root: Path, tmp_path: Path, listed: object, status: int, outcome: str
) -> None:
    done = run(tmp_path, "verify", root, "--exec", "--checks", checks(tmp_path, listed), "--json", tmp_path / "v.json")
    assert done.returncode == status, done.stderr
    report = json.loads((tmp_path / "v.json").read_text())
    found = {c["name"]: c["outcome"] for c in report["checks"]}
    assert [found[f"container-{gate}"] for gate in ("archive", "assembly", "exec")] == ["skipped", "skipped", outcome]
    assert (report["ok"], report["subjects"]) == (status == 0, [])


def test_checks_are_announced_before_they_run(root: Path, tmp_path: Path) -> None:
    """They may take an hour, and their outcomes come all at once."""
    words = ("--progress", "json", "verify", root, "--exec", "--checks", checks(tmp_path, OK))
    events = [json.loads(line) for line in run(tmp_path / "cache", *words).stderr.splitlines()]
    told = [(e["kind"], e.get("message", "")) for e in events if e["task"] == "run checks"]
    assert told == [("start", ""), ("note", "'good'"), ("done", "")]


def test_options_of_exec_behind_the_subject_are_told_apart(root: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "exec", root, "--cache", tmp_path, "--", "/bin/true")
    assert done.returncode == 127 and "options of exec stand before SUBJECT" in done.stderr, done.stderr
    done = run(tmp_path, "exec", root, "--", "--cache")
    assert done.returncode == 127 and "options of exec" not in done.stderr, done.stderr


@pytest.mark.parametrize("option", [["--receipt", "r.json"], ["--profile", "strict"], ["--secrets"]])
def test_a_folder_cannot_be_held_to_what_only_archives_have(root: Path, tmp_path: Path, option: list[str]) -> None:
    done = run(tmp_path, "verify", root, "--exec", "--checks", checks(tmp_path, OK), *option)
    assert (done.returncode, option[0] in done.stderr) == (2, True)


def test_a_folder_without_exec_is_no_archive(root: Path, tmp_path: Path) -> None:
    assert run(tmp_path, "verify", root).returncode == 2


def test_a_file_called_index_json_makes_no_layout(root: Path, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("{}")
    (tmp_path / "bin").mkdir()
    assert is_tree(tmp_path)
    (tmp_path / "oci-layout").write_text("{}")
    assert not is_tree(tmp_path)


@pytest.mark.parametrize("names", [["blobs/"], ["index.json"], ["oci-layout"], ["oci-layout", "blobs/"], ["manifest.json"]])
def test_half_a_layout_is_no_tree(tmp_path: Path, names: list[str]) -> None:
    """``/bin/true is not in the image`` sends people after the image, and not after the copy that broke off."""
    half = tmp_path / "half"
    half.mkdir()
    for name in names:
        (half / name).mkdir() if name.endswith("/") else (half / name).write_text("{}")
    done = run(tmp_path, "exec", half, "--", "/bin/true")
    assert (done.returncode, "error[archive." in done.stderr or "error[json." in done.stderr) == (3, True), done.stderr
    assert not list(tmp_path.glob("staged/*/rootfs"))


def test_an_index_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "half/blobs").mkdir(parents=True)
    os.mkfifo(tmp_path / "half/index.json")
    done = run(tmp_path, "exec", tmp_path / "half", "--", "/bin/true")
    assert (done.returncode, "archive.member" in done.stderr) == (3, True), done.stderr


STOPPED = """
import os, signal, time
import oci_builder.unpack
from oci_builder.cli import main
def unpack(source, folder, *_):
    (folder / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
oci_builder.unpack.unpack_image = unpack
main()
"""


def test_a_scheduler_s_end_leaves_no_half_staged_tree(tmp_path: Path) -> None:
    archive = tmp_path / "archive.tar"
    archive.write_bytes(bytes(1024))
    done = run(tmp_path / "cache", "exec", archive, "--", "true", program=STOPPED)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    names = [path.name for path in (tmp_path / "cache/staged").iterdir()]
    assert names, "it was not staged at all"
    assert not [name for name in names if name.endswith(".partial")]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_dev_null_for_the_program_too(root: Path, tmp_path: Path, closed: str) -> None:
    """What it opens first must not become its standard output."""
    script = "for n in 0 1 2; do test -e /proc/self/fd/$n || exit $((n + 10)); done"
    assert run(tmp_path, "exec", root, "--", "/bin/sh", "-c", script, shell=f'exec "$@" {closed}').returncode == 0


@pytest.mark.parametrize(("place", "status"), [("none/r.json", 2), ("there.json", 6)])
def test_a_receipt_that_cannot_be_written_is_said_before_any_check_runs(
    root: Path, tmp_path: Path, place: str, status: int
) -> None:
    (tmp_path / "there.json").write_text("{}")
    archive = tmp_path / "archive.tar"
    archive.write_bytes(bytes(1024))
    done = run(tmp_path, "verify", archive, "--exec", "--checks", checks(tmp_path, OK), "--receipt", tmp_path / place)
    assert done.returncode == status
    assert "container-exec" not in done.stdout


NOTED = """
import oci_builder.execution.run as run
from oci_builder.cli import main
notes = ["/proc is the host's", "[sandbox.attributes] no user attributes in memory here"]
run.run_in = lambda *_: run.ExitStatus(5, "", "", {"sandbox": {"root": "overlay", "notes": notes}})
main()
"""


def test_exec_says_the_notes_that_have_a_code(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    done = run(tmp_path, "exec", tmp_path / "root", "--", "true", program=NOTED)
    assert (done.returncode, done.stderr) == (5, "note[sandbox.attributes]: no user attributes in memory here\n")


NO_OVERLAY = """
import oci_builder.execution.run as run
from oci_builder.cli import main
run.run_in = lambda *_: run.ExitStatus(7, "", "", {"sandbox": {"root": "%s"}})
main()
"""


@pytest.mark.parametrize(("kind", "said"), [("read-only", True), ("overlay", False)])
def test_it_is_said_that_the_folder_was_read_only(tmp_path: Path, kind: str, said: bool) -> None:
    (tmp_path / "root").mkdir()
    done = run(tmp_path, "exec", tmp_path / "root", "--", "true", program=NO_OVERLAY % kind)
    assert (done.returncode, "no overlay" in done.stderr) == (7, said)
