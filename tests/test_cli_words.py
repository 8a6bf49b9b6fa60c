"""What the command line says where people would be lost without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Built

ROOT = Path(__file__).resolve().parent.parent


def call(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The program, as ``python -m oci_builder``."""
    command = [sys.executable, "-m", "oci_builder", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **env})


def test_two_archives_of_one_image_are_said_to_be_that(quick: Built) -> None:
    """Their manifests differ, which looks wrong to whoever compares them."""
    config = quick.container["config"]["digest"]
    both = call("verify", quick.oci, quick.docker).stdout
    assert f"the same image: config {config}\nok, 0 warnings\n" in both
    assert "the same image" not in call("verify", quick.oci).stdout


@pytest.mark.parametrize("verb", ["verify", "inspect"])
def test_the_portable_archive_is_no_image_and_it_is_said_what_it_is_for(quick: Built, verb: str) -> None:
    done = call(verb, quick.portable)
    assert done.returncode == 3 and "ensure_runtime.sh" in done.stdout + done.stderr


def test_an_interruption_while_the_program_is_loaded_leaves_no_traceback(tmp_path: Path) -> None:
    """Ctrl-C right after Enter: on a network's file system the imports take seconds."""
    (tmp_path / "click.py").write_text("import signal; signal.raise_signal(signal.SIGINT)\n")
    done = call("--help", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_digest_without_its_algorithm_is_told_what_is_missing(tmp_path: Path) -> None:
    """What sha256sum prints is what people paste."""
    done = call("pull", "localhost:1/x@" + 64 * "a", tmp_path / "layout")
    assert done.returncode == 2 and "write sha256: before it" in done.stderr
    assert "before it" not in call("pull", "localhost:1/x@latest", tmp_path / "layout").stderr
