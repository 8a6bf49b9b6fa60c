"""Every stage on this machine, from the spec to a qualified release, through the command line (issue 8, items 2, 4)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oci_builder.engines.local import LocalRunner
from oci_builder.engines.local_limits import find_gpus
from oci_builder.model.errors import SpecError
from oci_builder.model.receipts import DOCKER, OCI, PORTABLE
from oci_builder.receipt import show_receipt, verify_receipt
from oci_builder.release.host import utc_now
from tests.engines.stages_lab import NCCL, ROOT, Lab, make_lab
from tests.lab.waits import until

# For the worker only: all archives are whole in their staging folder, and none has its name yet.
HELD = """
import os, sys, time
if "oci_builder.engines.local_worker" in sys.orig_argv:
    from oci_builder import build
    def held(*_):
        with open({place!r} + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename({place!r} + ".new", {place!r})
        time.sleep(3600)
    build.Outputs.publish = held
"""
CHAIN = ("build", "package", "container", "container-check", "qualification")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lab, dict[str, dict[str, Any]]]:
    """The stages in turn, each as a command of its own, and their results. Read only."""
    lab = make_lab(tmp_path_factory.mktemp("stages"))
    return lab, {name: lab.result(name) for name in CHAIN}


def said(path: Path, lab: Lab) -> dict[str, Any]:
    value: dict[str, Any] = show_receipt(verify_receipt(path, lab.trust, utc_now()))
    assert value["answer"] == "verified"
    return value


def test_each_stage_passes(chain: tuple[Lab, dict[str, Any]]) -> None:
    assert {name: r["outcome"] for name, r in chain[1].items()} == dict.fromkeys(CHAIN, "pass")
    assert {r["engine"] for r in chain[1].values()} == {"local"}


def test_package_names_what_lies_there(chain: tuple[Lab, dict[str, Any]]) -> None:
    lab, results = chain
    lies = {n: hashlib.sha256((lab.out / n).read_bytes()).hexdigest() for n in (PORTABLE, OCI, DOCKER)}
    assert results["package"]["outputs"] == results["container"]["outputs"] == lies


def test_container_finds_nothing_to_change(chain: tuple[Lab, dict[str, Any]]) -> None:
    assert chain[1]["container"]["details"]["unchanged"] is True


def test_each_receipt_is_signed_about_all_three_archives(chain: tuple[Lab, dict[str, Any]]) -> None:
    lab, results = chain
    found = {said(p, lab)["receipt"]["stage"]: said(p, lab)["subjects"] for p in lab.receipts()}
    assert found == dict.fromkeys(("record", "container", "container-check"), results["package"]["outputs"])


def test_a_receipt_says_what_its_machine_was_held_to(chain: tuple[Lab, dict[str, Any]]) -> None:
    lab, _ = chain
    needs = {r["stage"]: r["details"]["needs"] for r in (said(p, lab)["receipt"] for p in lab.receipts())
             if r["stage"] != "record"}  # fmt: skip
    assert needs["container"]["preemptible"] is False
    assert needs["container-check"]["network"] is False


def test_the_receipts_qualify_the_release(chain: tuple[Lab, dict[str, Any]]) -> None:
    lab, results = chain
    assert results["qualification"]["details"]["state"] == "pass"
    assert json.loads((lab.release / "qualification.json").read_text())["state"] == "pass"


def test_container_recorded_the_release(chain: tuple[Lab, dict[str, Any]]) -> None:
    lab, _ = chain
    assert {"portable.json", "container.json", "provenance.json"} <= {p.name for p in lab.release.iterdir()}


def test_nothing_is_left_in_scratch(chain: tuple[Lab, dict[str, Any]]) -> None:
    lab, results = chain
    assert list((lab.root / "cache/stages").iterdir()) == []
    assert {r["kept"] for r in results.values()} == {""}


@pytest.mark.parametrize("name", ["package", "container"])
def test_a_stage_runs_again_on_the_same_request(chain: tuple[Lab, dict[str, Any]], name: str) -> None:
    """A preempted stage is started again with its old input."""
    lab, results = chain
    again = lab.result(name)
    assert (again["outcome"], again["outputs"]) == ("pass", results[name]["outputs"])


def test_a_qualified_release_is_not_repacked(chain: tuple[Lab, dict[str, Any]]) -> None:
    lab, _ = chain
    before = (lab.out / PORTABLE).stat()
    found = lab.result("repack", "-o", "marker=marker.json")
    assert (found["outcome"], found["error"]["code"], found["exit"]) == ("error", "release.qualified", 6)
    assert (lab.out / PORTABLE).stat() == before


@pytest.mark.parametrize("name", ["single", "nccl8"])
def test_a_gpu_stage_is_refused_where_there_is_none(chain: tuple[Lab, dict[str, Any]], name: str) -> None:
    lab, _ = chain
    before = lab.receipts()
    if find_gpus():
        pytest.skip("this machine has GPUs")
    done = lab.stage(name)
    assert (done.returncode, "error[needs.gpu]" in done.stderr) == (4, True), done.stderr
    assert lab.receipts() == before


def test_nccl8_u24_wants_the_receipt_of_the_first_ubuntu(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, gates=[NCCL], base={"scratch": True})
    assert lab.stage("container").returncode == 0
    done = lab.stage("nccl8-u24")
    assert (done.returncode, "error[stage.first]" in done.stderr) == (4, True)


def test_publish_wants_a_token(chain: tuple[Lab, dict[str, Any]]) -> None:
    lab, _ = chain
    found = lab.result("publish", "-o", "repo=a/b", "-o", "helper=layers/files/activate.sh", env={"HF_TOKEN": ""})
    assert (found["error"]["code"], found["exit"]) == ("spec.token", 2)


def test_repack_changes_packaging_and_starts_over(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    first = lab.result("container")["outputs"][PORTABLE]
    (tmp_path / "layers/files/activate.sh").write_text("echo 2\n")
    found = lab.result("repack", "-o", "marker=marker.json")
    assert found["outcome"] == "pass", found["error"]
    assert found["outputs"][PORTABLE] != first
    assert hashlib.sha256((tmp_path / f"dist.{first[:12]}" / PORTABLE).read_bytes()).hexdigest() == first
    receipt = said(next(lab.release.glob("receipts/repack-*.json")), lab)["receipt"]
    assert (receipt["stage"], receipt["details"]["from"]) == ("repack", first)
    assert lab.result("qualification")["details"]["state"] == "candidate"

    # The command of the same name does the same, with the same checks before the new build takes the old one's place.
    (tmp_path / "layers/files/activate.sh").write_text("echo 3\n")
    words = ("repack", "dist", "releases/v1-r1", "--marker", "marker.json", "--cache", "cache")
    done = lab.command(*words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"dist.{found['outputs'][PORTABLE][:12]}").is_dir()
    said_by = said(next(lab.release.glob("receipts/repack-*.json")), lab)["receipt"]
    assert {c["name"] for c in said_by["checks"]} == {c["name"] for c in receipt["checks"]}


def test_the_time_limit_ends_a_stage_and_leaves_nothing_half(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, base={"scratch": True})
    done = lab.stage("package", "--timeout", "0.001")
    assert (done.returncode, "error[stage.timeout]" in done.stderr) == (1, True), done.stderr
    assert [p.name for p in lab.out.iterdir()] == [] if lab.out.exists() else True
    assert lab.stage("package").returncode == 0


@pytest.mark.parametrize(("name", "code"), [("none", "error[stage.option]"), ("open", "error[key.mode]"), ("spec.json", "error[key.")])
def test_a_key_that_cannot_sign_is_found_out_first(tmp_path: Path, name: str, code: str) -> None:
    lab = make_lab(tmp_path, base={"scratch": True})
    (tmp_path / "open").write_bytes(lab.key.read_bytes())
    (tmp_path / "open").chmod(0o644)
    done = lab.stage("package", "--key", name)
    assert code in done.stderr
    assert not lab.out.exists()


def test_a_stage_without_room_is_not_started(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, base={"scratch": True})
    done = lab.stage("package", "--scratch", "3000")
    assert (done.returncode, "error[io.space]" in done.stderr, lab.out.exists()) == (5, True, False)


def test_modal_is_not_started_before_somebody_agreed_to_its_cost(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, base={"scratch": True})
    done = lab.stage("container", "--on", "modal")
    assert (done.returncode, "error[budget.agreed]" in done.stderr) == (4, True), done.stderr
    assert "not preemptible (CPU and memory billed 3 times)" in done.stderr


def test_a_budget_s_limit_holds_whatever_is_said(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, base={"scratch": True})
    (tmp_path / "budget.toml").write_text("[rates]\ncpu = 1\nmemory = 1\n[limits]\nstage = 1\n")
    done = lab.stage("container", "--on", "modal", "--yes")
    assert (done.returncode, "error[budget.limit]" in done.stderr) == (4, True), done.stderr


@pytest.mark.parametrize("given", [("--timeout", "nan"), ("--timeout", "0"), ("--timeout", "inf"), ("--scratch", "-1")])
def test_amounts_that_are_none(given: tuple[str, str]) -> None:
    with pytest.raises(SpecError):
        LocalRunner(**{{"--timeout": "timeout_s", "--scratch": "scratch_gib"}[given[0]]: float(given[1])})


def test_a_stage_that_is_killed_is_told_as_such(tmp_path: Path) -> None:
    """As the kernel kills it for lack of memory: no verdict, so not exit 1."""
    lab = make_lab(tmp_path, base={"scratch": True})
    pid = tmp_path / "held/pid"
    pid.parent.mkdir()
    (tmp_path / "held/sitecustomize.py").write_text(HELD.format(place=str(pid)))
    words = ["stage", "package", "--spec", "spec.json", "--out", "dist", "--cache", "cache"]
    code = "from oci_builder.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=lab.root, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}/held:{ROOT}"},
    )  # fmt: skip
    until(pid.exists)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err.count("error[stage.died]")) == (5, 1), err
    assert "137" in err and "memory" in err
    assert not (lab.out / PORTABLE).exists()
