"""What ``make demo`` shows as a command can be typed."""

from __future__ import annotations

import shlex
import subprocess

from tests.test_imports import ROOT

WORDS = ["exec", "--cache", "dist/a b", "dist/x.tar", "-c", 'import sys, numpy; print("it\'s", $HOME)', ""]


def test_a_shown_command_is_the_command() -> None:
    script = """
    say() { :; }; busy() { :; }; venv=.venv; out=dist
    eval "$(sed -n '/^run() {/,/^}/p' scripts/demo.sh)"
    run 'looking' "$@"
    """
    shown = subprocess.run(["bash", "-euc", script, "-", *WORDS], cwd=ROOT, capture_output=True, text=True, check=True)
    dollar, program, *words = shlex.split(shown.stdout)
    assert (dollar, program, words) == ("$", ".venv/bin/oci-builder", WORDS)
