"""Time limits hold for everything that a check starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import checks_lab  # noqa: F401
import pytest
from nrl_checks import process, runner

_ESCAPES = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import os, time\\nif os.fork() == 0:\\n os.setsid(); time.sleep(600)"])
child.wait()
time.sleep({wait})
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def alive_below() -> int:
    return len(process.descendants(os.getpid()))


def test_a_timeout_kills_a_child_in_a_session_of_its_own() -> None:
    before = alive_below()
    for seconds in (2, 20, 200):
        done = process.run(python(_ESCAPES.format(wait=600)), timeout=seconds)
        assert done.timed_out
        assert alive_below() == before
        if done.left:
            break  # else there was no time to start it
    assert done.left >= 1


def test_what_a_program_leaves_running_is_killed_at_its_end() -> None:
    before = alive_below()
    done = process.run(python(_ESCAPES.format(wait=0)), timeout=300)
    assert (done.status, done.timed_out, done.left) == (0, False, 1)
    assert alive_below() == before


def test_an_interruption_while_a_program_starts_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            raise KeyboardInterrupt

    before = alive_below()
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.run(python("import time; time.sleep(600)"), timeout=300)
    assert alive_below() == before


def test_what_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs inside a driver ignores every signal, until the node is started again."""
    before, started = process.descendants(os.getpid()), time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(process, "GRACE", 0.2)
        patched.setattr(process, "kill_tree", lambda *_: 1)
        done = process.run(python("import time; time.sleep(600)"), timeout=0.5)
    assert (done.status, done.timed_out) == (137, True)
    assert process.kill_tree(None, before) == 1, "it still ran"
    assert time.monotonic() - started < 300


def test_a_timeout_is_kept() -> None:
    started = time.monotonic()
    process.run(python("import time; time.sleep(600)"), timeout=0.5)
    assert time.monotonic() - started < 300


def test_a_signal_gives_128_and_its_number() -> None:
    assert process.run(python("import os; os.kill(os.getpid(), 9)"), timeout=300).status == 137


def test_a_program_that_is_not_there() -> None:
    assert process.run(["/nonexistent"], timeout=300).status == 127


def test_a_pass_that_ran_too_long_is_a_failure() -> None:
    code = 'import time; print(\'{"outcome": "pass"}\', flush=True); time.sleep(600)'
    row = runner.run_one({"name": "slow", "argv": python(code), "timeout": 1})
    assert row["outcome"] == "fail"
    assert "not done after" in row["reason"]
