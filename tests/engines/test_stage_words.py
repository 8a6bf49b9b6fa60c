"""Words of ``oci-builder stage`` that cannot end well are refused before anything is started, with the status of a wrong
input: a script takes the status of a failed disk for one that may be tried again."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from oci_builder.cli import main

ROOT = Path(__file__).resolve().parents[2]
MAIN = "from oci_builder.cli import main; main()"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    value = {"name": "x", "tag": "t", "base": {"scratch": True}, "prefix": "/opt/rt", "tiers": {"one": {"path": "one"}}}
    (tmp_path / "one").mkdir()
    (tmp_path / "spec.json").write_text(json.dumps(value))
    return tmp_path / "spec.json"


@dataclass(frozen=True)
class Ended:
    status: int
    err: str


@pytest.fixture
def stage(spec: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command in this process: a process for each of these words would take longer than all of them."""
    monkeypatch.chdir(spec.parent)

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["oci-builder", "stage", *words, "--spec", str(spec)])
        with pytest.raises(SystemExit) as end:
            main()
        return Ended(int(end.value.code or 0), capfd.readouterr().err)

    return run


def refused(done: Ended, status: int, code: str) -> None:
    assert (done.status, done.err.count(f"error[{code}]")) == (status, 1), done.err
    assert "Traceback" not in done.err


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
        ("build", "--trust", "gone.json"),
        ("container", "--trust", "one"),
    ],
    ids=["checks", "checks-folder", "allow", "root", "trust", "release-file", "key", "trust-unused", "trust-folder"],
)
def test_a_name_of_nothing_is_a_wrong_input(words: tuple[str, ...], stage: Callable[..., Ended]) -> None:
    refused(stage(*words), 2, "stage.option")


def test_checks_that_are_none_are_told_before_the_stage(spec: Path, stage: Callable[..., Ended]) -> None:
    (spec.parent / "checks.json").write_text("[{}]")
    refused(stage("container-check", "-o", "checks=checks.json"), 2, "spec.checks")


@pytest.mark.parametrize("name", ["build", "container", "container-check"])
def test_a_gate_with_a_misspelt_key_is_told_before_the_stage(
    name: str, spec: Path, stage: Callable[..., Ended]
) -> None:
    """The build reads no gates; hours later the release would be recorded by them."""
    value = json.loads(spec.read_text())
    spec.write_text(json.dumps({**value, "gates": [{"name": "a", "stage": "single", "chekcs": ["x"]}]}))
    done = stage(name)
    refused(done, 2, "spec.gate")
    assert "did you mean 'checks'?" in done.err


@pytest.mark.parametrize("kind", ["dangling", "folder"])
def test_a_budget_that_cannot_be_read_is_not_no_budget(kind: str, spec: Path, stage: Callable[..., Ended]) -> None:
    pytest.importorskip("modal", reason="needs the extra 'modal'")
    budget = spec.parent / "budget.toml"
    budget.mkdir() if kind == "folder" else budget.symlink_to("gone")
    refused(stage("build", "--on", "modal"), 2, "budget.file")


@pytest.mark.parametrize(
    "words", [("--scratch", "1"), ("--timeout", "60"), ("--any-gpu",), ("--out", "x"), ("--cache", "x")]
)
def test_what_modal_would_ignore_is_refused(words: tuple[str, ...], stage: Callable[..., Ended]) -> None:
    done = stage("build", "--on", "modal", "--yes", *words)
    refused(done, 2, "stage.option")
    assert words[0] in done.err


@pytest.mark.parametrize("text", ["not = [toml", "flat = 1"])
def test_damaged_settings_of_the_client_are_no_traceback(text: str, spec: Path) -> None:
    pytest.importorskip("modal", reason="needs the extra 'modal'")
    config = spec.parent / "modal.toml"
    config.write_text(text)
    command = [sys.executable, "-c", MAIN, "stage", "build", "--on", "modal", "--yes", "--spec", str(spec)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MODAL_CONFIG_PATH": str(config)}
    done = subprocess.run(command, cwd=spec.parent, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    refused(Ended(done.returncode, done.stderr), 2, "modal.config")
    assert "modal.toml" in done.stderr and "modal token new" in done.stderr


@pytest.mark.parametrize("keys", [b"n\n", b"\x04", b"\x03"], ids=["no", "end", "interrupt"])
def test_whatever_is_not_yes_starts_nothing(keys: bytes, spec: Path) -> None:
    """On a terminal the question is asked in words that stay to be read; 1 would be a check that said no."""
    pytest.importorskip("modal", reason="needs the extra 'modal'")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(
            sys.executable, [sys.executable, "-c", MAIN, "stage", "build", "--on", "modal", "--spec", str(spec)],
            {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
        )  # fmt: skip
    said, asked = b"", False
    with suppress(OSError):  # how a terminal tells that nobody writes any more
        while True:
            # Python loses a Ctrl-C that comes just before it waits for a line; people press it again, too.
            if select.select([terminal], [], [], 2)[0]:
                piece = os.read(terminal, 4096)
                if not piece:
                    break
                said += piece
                if asked or b"[y/N]" not in said:
                    continue
            asked = bool(asked or b"[y/N]" in said) and bool(os.write(terminal, keys))
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert (status, b"error[budget.agreed]" in said) == (4, True), said
    assert asked, said
