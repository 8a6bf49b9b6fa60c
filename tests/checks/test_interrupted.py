"""Ranks and checks that are interrupted, or fail: nothing is left running, and the reason is that of the first to fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checks_lab import FILES
from nrl_checks import nccl, process
from nrl_checks.common import Result

from tests.lab.waits import until


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, world: int = 3, timeout: float = 300) -> Result:
    """Ranks that run this shell code instead of torch."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{code}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    result = Result()
    nccl.launch(result, world, folder, timeout)
    return result


def below() -> frozenset[int]:
    return process.descendants(os.getpid())


def test_the_rank_that_failed_is_named_and_those_killed_for_it_do_not_crowd_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = below()
    code = 'printf "%0900d" 0; if [ $RANK = 7 ]; then sleep 1; echo out of memory; exit 3; fi; exec sleep 600'
    result = launched(tmp_path, monkeypatch, code, world=8)
    reason = result.to_json()["reason"]
    assert reason.startswith("rank 7 ended with 3")
    assert "out of memory" in reason
    assert "killed for it: rank 0, rank 1" in reason
    assert below() == before


def test_ranks_that_hang_are_killed_and_each_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = below()
    result = launched(tmp_path, monkeypatch, "exec sleep 600", timeout=0.5)
    assert "not done after 0.5 seconds" in result.reasons[0]
    assert [reason[:6] for reason in result.reasons[1:]] == ["rank 0", "rank 1", "rank 2"]
    assert below() == before


def test_an_interruption_ends_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone (no runner above it that would end them) the check left its ranks on the GPUs."""

    sleep, slept = time.sleep, []

    def interrupted(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            raise SystemExit(143)
        sleep(seconds)

    before = below()
    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(SystemExit):
        launched(tmp_path, monkeypatch, "exec sleep 600")
    monkeypatch.undo()
    assert below() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_run_that_is_asked_to_end_twice_ends_its_check_and_writes_its_receipt(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A closed terminal and an impatient user included."""
    started = tmp_path / "started"
    argv = ["sh", "-c", f"echo $$ > {started}; exec sleep 600"]
    (tmp_path / "list.json").write_text(json.dumps({"checks": [{"name": "long", "argv": argv}]}))
    command = [sys.executable, "-S", str(FILES / "checks"), "run", "--list", f"{tmp_path}/list.json",
               "--json", f"{tmp_path}/receipt.json"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as runner:
        until(lambda: started.exists() and started.read_text().endswith("\n"))
        runner.send_signal(number)
        runner.send_signal(number)
        assert runner.wait(300) == 1
    assert json.loads((tmp_path / "receipt.json").read_text())["checks"][0]["reason"] == "interrupted"
    assert not Path("/proc", started.read_text().strip()).exists()


@pytest.mark.parametrize(
    "how",
    ["| true", "2>&1 >&- | true", "> /dev/full 2>&1", "2>&-", ">&- 2>&-", "2> /dev/null > /dev/null; exit $?"],
)
def test_a_receipt_outlives_the_terminal(tmp_path: Path, how: str) -> None:
    """Nobody reads any more, or the terminal has no such letters: a table that cannot be shown cost the receipt."""
    answer = {"outcome": "pass", "reason": "█", "details": {"loss": float("nan")}}
    code = f"import json; print(json.dumps({answer!r}, default=str))".replace("nan", "float('nan')")
    checks = [{"name": name, "argv": [sys.executable, "-S", "-c", code]} for name in ("a█", "b")]
    (tmp_path / "list.json").write_text(json.dumps({"checks": checks}))
    command = '"$0" -S "$1" run --list list.json --json receipt.json'
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    subprocess.run(
        ["bash", "-c", f"{command} {how}", sys.executable, str(FILES / "checks")], cwd=tmp_path, env=env, check=False
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    receipt = json.loads((tmp_path / "receipt.json").read_text(), parse_constant=refuse)
    assert [(row["outcome"], row["details"]) for row in receipt["checks"]] == [("pass", {"loss": "nan"})] * 2
