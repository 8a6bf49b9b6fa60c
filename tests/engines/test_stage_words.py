"""Words of ``oci-builder stage`` that cannot end well are refused before anything is started, with the status of a wrong
input: a script takes the status of a failed disk for one that may be tried again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAIN = "from oci_builder.cli import main; main()"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    value = {"name": "x", "tag": "t", "base": {"scratch": True}, "prefix": "/opt/rt", "tiers": {"one": {"path": "one"}}}
    (tmp_path / "one").mkdir()
    (tmp_path / "spec.json").write_text(json.dumps(value))
    return tmp_path / "spec.json"


def stage(spec: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, "stage", *words, "--spec", str(spec)]
    return subprocess.run(
        command, cwd=spec.parent, env={**os.environ, "PYTHONPATH": str(ROOT), **env}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def refused(done: subprocess.CompletedProcess[str], status: int, code: str) -> None:
    assert (done.returncode, done.stderr.count(f"error[{code}]")) == (status, 1), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("container-check", "-o", "checks=gone.json"),
        ("container-check", "-o", "checks=one"),
        ("container", "-o", "allow=gone.json"),
        ("single", "-o", "root=gone"),
        ("qualification", "--release", "one", "--trust", "gone.json"),
        ("build", "--release", "spec.json"),
        ("build", "--release", "one", "--key", "gone"),
    ],
    ids=["checks", "checks-folder", "allow", "root", "trust", "release-file", "key"],
)
def test_a_name_of_nothing_is_a_wrong_input(words: tuple[str, ...], spec: Path) -> None:
    refused(stage(spec, *words), 2, "stage.option")


def test_checks_that_are_none_are_told_before_the_stage(spec: Path) -> None:
    (spec.parent / "checks.json").write_text("[{}]")
    refused(stage(spec, "container-check", "-o", "checks=checks.json"), 2, "spec.checks")


@pytest.mark.parametrize("kind", ["dangling", "folder"])
def test_a_budget_that_cannot_be_read_is_not_no_budget(kind: str, spec: Path) -> None:
    pytest.importorskip("modal", reason="needs the extra 'modal'")
    budget = spec.parent / "budget.toml"
    budget.mkdir() if kind == "folder" else budget.symlink_to("gone")
    refused(stage(spec, "build", "--on", "modal"), 2, "budget.file")


@pytest.mark.parametrize(
    "words", [("--scratch", "1"), ("--timeout", "60"), ("--any-gpu",), ("--out", "x"), ("--cache", "x")]
)
def test_what_modal_would_ignore_is_refused(words: tuple[str, ...], spec: Path) -> None:
    done = stage(spec, "build", "--on", "modal", "--yes", *words)
    refused(done, 2, "stage.option")
    assert words[0] in done.stderr


@pytest.mark.parametrize("text", ["not = [toml", "flat = 1"])
def test_damaged_settings_of_the_client_are_no_traceback(text: str, spec: Path) -> None:
    pytest.importorskip("modal", reason="needs the extra 'modal'")
    config = spec.parent / "modal.toml"
    config.write_text(text)
    done = stage(spec, "build", "--on", "modal", "--yes", MODAL_CONFIG_PATH=str(config))
    refused(done, 2, "modal.config")
    assert "modal.toml" in done.stderr and "modal token new" in done.stderr
