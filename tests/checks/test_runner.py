"""Several checks: what counts as a pass, the table, the receipt, and the lists that gates and chroot runner read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checks_lab import FILES
from nrl_checks import listing, runner
from nrl_checks.process import Done

from chroot_exec.protocol import parse_checks
from oci_builder.transports.layerfiles import read_definitions

ROOT = FILES.parents[1]


def printing(value: object, status: int = 0) -> list[str]:
    return [sys.executable, "-c", f"print({json.dumps(value)!r}); raise SystemExit({status})"]


@pytest.mark.parametrize(
    ("answer", "status", "more", "outcome"),
    [
        ({"outcome": "pass"}, 0, {}, "pass"),
        ({"outcome": "pass"}, 1, {}, "fail"),
        ({"outcome": "skipped", "reason": "no time"}, 0, {}, "fail"),
        ({"outcome": "deferred", "reason": "no driver"}, 0, {}, "fail"),
        ({"outcome": "deferred", "reason": "no driver"}, 0, {"deferrable": True}, "deferred"),
        ({"outcome": "deferred", "reason": ""}, 0, {"deferrable": True}, "fail"),
        ({"outcome": "PASS"}, 0, {}, "fail"),
        ("pass", 0, {}, "fail"),
    ],
)
def test_only_a_pass_is_a_pass(answer: object, status: int, more: dict[str, Any], outcome: str) -> None:
    row = runner.run_one({"name": "a", "argv": printing(answer, status), "timeout": 300, **more})
    assert row["outcome"] == outcome
    assert (row["reason"] == "") == (outcome == "pass")


def test_a_check_that_cannot_be_run_loses_no_other_s_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up on the way, say."""

    def full(check: dict[str, Any]) -> dict[str, Any]:
        if check["name"] == "b":
            raise OSError(28, "No space left on device")
        return run_one(check)

    run_one = runner.run_one
    monkeypatch.setattr(runner, "run_one", full)
    receipt = runner.run_all([{"name": n, "argv": printing({"outcome": "pass"})} for n in "abc"])
    assert [row["outcome"] for row in receipt["checks"]] == ["pass", "fail", "pass"]
    assert "No space left" in receipt["checks"][1]["reason"]
    assert receipt["outcome"] == "fail"


def test_silence_is_a_failure() -> None:
    outcome, reason, _ = runner.verdict({}, Done(0, "", "", 0.1, False, 0))
    assert outcome == "fail"
    assert "no result" in reason


def run_list(tmp_path: Path, checks: list[dict[str, Any]], *more: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "list.json").write_text(json.dumps({"checks": checks}))
    command = [sys.executable, str(FILES / "checks"), "run", "--list", str(tmp_path / "list.json"), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_table_receipt_and_status(tmp_path: Path) -> None:
    checks = [{"name": "good", "argv": printing({"outcome": "pass", "details": {"n": 1}})},
              {"name": "bad", "argv": printing({"outcome": "fail", "reason": "no GPU"}, 1)}]  # fmt: skip
    done = run_list(tmp_path, checks, "--json", str(tmp_path / "receipt.json"))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "2 checks: 1 pass, 1 fail"
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["outcome"] == "fail"
    assert [row["outcome"] for row in receipt["checks"]] == ["pass", "fail"]
    assert receipt["checks"][0]["details"] == {"n": 1}


def test_nothing_to_run_is_no_success(tmp_path: Path) -> None:
    assert run_list(tmp_path, []).returncode == 2
    assert run_list(tmp_path, [{"name": "a", "argv": printing({"outcome": "pass"})}], "--only", "b").returncode == 2


@pytest.mark.parametrize("stage", listing.STAGES)
def test_the_chroot_runner_takes_every_list(stage: str) -> None:
    found = listing.checks(stage, "/opt/rt", ["base", "automodel", "vllm"], "/srv/rt")
    assert len(parse_checks(json.dumps(found))) == len(found)


@pytest.mark.parametrize(
    ("gate", "stage"), [("imports-cpu", "container-check"), ("single", "single"), ("nccl8", "nccl")]
)
def test_a_list_has_every_check_that_its_gate_wants(gate: str, stage: str) -> None:
    gates = {g["name"]: g for g in json.loads((ROOT / "spec.json").read_text())["gates"]}
    found = listing.checks(stage, "/opt/rt", ["base", "automodel", "vllm"], "/srv/rt")
    assert set(gates[gate]["checks"]) <= {check["name"] for check in found}
    deferrable = {check["name"] for check in found if check.get("deferrable")}
    assert deferrable == set(gates[gate].get("deferrable", ()))


def test_the_shipped_list_is_the_one_that_the_program_gives() -> None:
    command = [sys.executable, str(FILES / "checks"), "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (FILES / "checks.json").read_text() == done.stdout


def test_the_layer_holds_checks_and_list() -> None:
    placed = read_definitions(ROOT / "layers")["checks"]
    assert {b"checks.json", b"checks/__main__.py", b"checks/nccl.py"} <= set(placed)
