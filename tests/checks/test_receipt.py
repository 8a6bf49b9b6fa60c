"""What a run of checks does with lists that are none, receipts that cannot be written, and interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checks_lab import FILES

from tests.lab.waits import until

GOOD = {"name": "good", "argv": ["/bin/sh", "-c", """echo '{"outcome": "pass"}'; : > ran"""]}
NO_LISTS = ["", "{}", "[]", "3", '{"checks": {}}', '{"checks": [3]}', '{"checks": [{"argv": ["true"]}]}',
            '{"checks": [{"name": "a"}]}', '{"checks": [{"name": "a", "argv": []}]}',
            '{"checks": [{"name": "a", "argv": [1]}]}', '{"checks": [{"name": "a", "argv": ["true"], "timeout": "x"}]}',
            '{"checks": [{"name": "a", "argv": ["true"], "timeout": -1}]}',
            '{"checks": [{"name": "a", "argv": ["true"]}, {"name": "a", "argv": ["true"]}]}']  # fmt: skip


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, str(FILES / "checks"), "run", "--list", str(folder / "list.json"), *more]


def ran(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *more), capture_output=True, text=True, timeout=300, cwd=folder)


@pytest.mark.parametrize("text", NO_LISTS)
def test_a_list_that_is_none_is_an_input_that_is_wrong(tmp_path: Path, text: str) -> None:
    (tmp_path / "list.json").write_text(text)
    done = ran(tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "list" in done.stderr


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    done = ran(tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


@pytest.mark.parametrize("place", ["there.json", "dangling.json", "no/such/folder.json"])
def test_a_receipt_that_cannot_be_written_is_found_out_before_anything_runs(tmp_path: Path, place: str) -> None:
    (tmp_path / "list.json").write_text(json.dumps({"checks": [GOOD]}))
    (tmp_path / "there.json").write_text("of an earlier run")
    (tmp_path / "dangling.json").symlink_to("nowhere")
    done = ran(tmp_path, "--json", place)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "there.json").read_text() == "of an earlier run"


def test_a_receipt_whose_name_was_taken_meanwhile_is_shown_instead(tmp_path: Path) -> None:
    taking = {"name": "a", "argv": ["/bin/sh", "-c", """echo '{"outcome": "pass"}'; echo other > receipt.json"""]}
    (tmp_path / "list.json").write_text(json.dumps({"checks": [taking]}))
    done = ran(tmp_path, "--json", "receipt.json")
    assert done.returncode == 1
    assert (tmp_path / "receipt.json").read_text() == "other\n"
    assert '"schema": "nrl-checks/1"' in done.stdout
    assert not list(tmp_path.glob(".receipt-*"))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_ends_all_that_runs_and_leaves_a_receipt(tmp_path: Path, number: int) -> None:
    """A scheduler's TERM must not leave a check on the GPU, nor cost what was found so far."""
    slow = {"name": "slow", "argv": ["/bin/sh", "-c", "echo $$ > pid.new; mv pid.new pid; sleep 600"]}
    (tmp_path / "list.json").write_text(json.dumps({"checks": [GOOD, slow, {**GOOD, "name": "last"}]}))
    process = subprocess.Popen(command(tmp_path, "--json", "r.json"), cwd=tmp_path, text=True, stderr=subprocess.PIPE)
    until((tmp_path / "pid").exists)
    process.send_signal(number)
    _, words = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Traceback" not in words
    assert not alive(int((tmp_path / "pid").read_text()))
    rows = json.loads((tmp_path / "r.json").read_text())["checks"]
    assert [(row["name"], row["outcome"], row["reason"]) for row in rows] == [
        ("good", "pass", ""), ("slow", "fail", "interrupted"), ("last", "fail", "not run"),
    ]  # fmt: skip
