"""A stage's tree of processes ends as one: at its time limit, at a signal, with its runner (issue 8, item 5)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.waits import until

# A child that leaves its session, its parent and its group, as a badly behaved helper of a stage would.
SCRIPT = """
import os, sys, time
from oci_builder.engines.local_tree import supervise

def stubborn():
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    if os.fork():
        os._exit(0)
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)

def run():
    if os.fork() == 0:
        stubborn()
    while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
        time.sleep(0.01)
    {rest}
    return 7

sys.exit(supervise(run, {limit}, 60.0))
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(tmp_path: Path, rest: str, limit: float) -> subprocess.Popen[bytes]:
    code = SCRIPT.format(rest=rest, limit=limit)
    return subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pid")])


def orphan(tmp_path: Path) -> int:
    place = tmp_path / "pid"
    return int(until(lambda: place.exists() and place.read_text()))


def test_a_stage_that_is_done_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "pass", 600)
    assert process.wait(300) == 7
    assert not alive(orphan(tmp_path))


def test_the_limit_ends_all_of_it(tmp_path: Path) -> None:
    for limit in (1, 10, 100):
        assert start(tmp_path, "time.sleep(600)", limit).wait(300) == 124
        if (tmp_path / "pid").exists():
            break  # else there was no time to start it
    assert not alive(orphan(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_of_it(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "time.sleep(600)", 600)
    pid = orphan(tmp_path)
    process.send_signal(number)
    assert process.wait(300) == 128 + signal.SIGTERM
    assert not alive(pid)


def test_a_runner_that_is_killed_takes_the_stage_along(tmp_path: Path) -> None:
    code = f"import subprocess, sys, time; subprocess.Popen({[sys.executable, '-c', SCRIPT.format(rest='time.sleep(600)', limit=600), str(tmp_path / 'pid')]!r}); time.sleep(600)"
    runner = subprocess.Popen([sys.executable, "-c", code])
    pid = orphan(tmp_path)
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait(300)
    until(lambda: not alive(pid))


def test_a_runner_that_was_killed_before_is_noticed(tmp_path: Path) -> None:
    """The kernel tells of its end only from when it was asked to."""
    code = (
        "import os, sys\nfrom oci_builder.engines.local_tree import supervise\n"
        f"sys.exit(supervise(lambda: os.mkdir({str(tmp_path / 'ran')!r}) or 0, 600, 60, int(sys.argv[1])))"
    )
    for runner, status in ((os.getpid() + 1, 143), (os.getpid(), 0)):
        assert subprocess.run([sys.executable, "-c", code, str(runner)], timeout=300).returncode == status
        assert (tmp_path / "ran").exists() == (status == 0)


def test_nobody_is_told_of_a_reader_that_was_killed() -> None:
    """``kill -9`` of the command leaves no traceback of its worker on the terminal."""
    code = (
        "import os\nfrom oci_builder.engines.local_worker import _Lines\nr, w = os.pipe()\nsay = _Lines(w)\n"
        "say({'event': 1})\nos.close(r)\nsay({'event': 2})\nsay({'event': 3})\nos._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_exception_is_shown_and_told(tmp_path: Path) -> None:
    code = "import sys\nfrom oci_builder.engines.local_tree import supervise\nsys.exit(supervise(lambda: 1 // 0, 600, 60))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stderr
