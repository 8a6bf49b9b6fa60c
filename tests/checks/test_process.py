"""Time limits hold for everything that a check starts."""

from __future__ import annotations

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
    import os

    return len(process.descendants(os.getpid()))


def test_a_timeout_kills_a_child_in_a_session_of_its_own() -> None:
    before = alive_below()
    done = process.run(python(_ESCAPES.format(wait=600)), timeout=2)
    assert done.timed_out
    assert done.left >= 1
    assert alive_below() == before


def test_what_a_program_leaves_running_is_killed_at_its_end() -> None:
    before = alive_below()
    done = process.run(python(_ESCAPES.format(wait=0)), timeout=30)
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
        process.run(python("import time; time.sleep(600)"), timeout=30)
    assert alive_below() == before


def test_what_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs inside a driver ignores every signal, until the node is started again."""
    monkeypatch.setattr(process, "GRACE", 0.2)
    monkeypatch.setattr(process, "kill_tree", lambda *_: 1)
    started = time.monotonic()
    done = process.run(python("import time; time.sleep(8)"), timeout=0.5)
    assert (done.status, done.timed_out) == (137, True)
    assert time.monotonic() - started < 7


def test_a_timeout_is_kept() -> None:
    started = time.monotonic()
    process.run(python("import time; time.sleep(600)"), timeout=0.5)
    assert time.monotonic() - started < 10


def test_a_signal_gives_128_and_its_number() -> None:
    assert process.run(python("import os; os.kill(os.getpid(), 9)"), timeout=30).status == 137


def test_a_program_that_is_not_there() -> None:
    assert process.run(["/nonexistent"], timeout=5).status == 127


def test_a_pass_that_ran_too_long_is_a_failure() -> None:
    code = 'import time; print(\'{"outcome": "pass"}\', flush=True); time.sleep(600)'
    row = runner.run_one({"name": "slow", "argv": python(code), "timeout": 1})
    assert row["outcome"] == "fail"
    assert "not done after" in row["reason"]
