"""Runs of the real program that can be killed at any moment and whose system calls can fail."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ran:
    """A finished run: exit status (negative: the signal that ended it), its output, and its seconds."""

    status: int
    text: str
    seconds: float


def shim(folder: Path) -> Path | None:
    """The library of ``shim.c``, to be preloaded, made in ``folder``; None where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    made = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made


class Zygote:
    """Starts runs. Use it as a context manager."""

    def __init__(self, folder: Path, preload: Path | None = None) -> None:
        self.log = folder / "run.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DOCKER_CONFIG": str(folder / "docker")}
        if preload is not None:
            environment["LD_PRELOAD"] = str(preload)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(300)

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        value: dict[str, Any] = json.loads(self._process.stdout.readline())
        return value

    def run(self, *argv: object, kill_after: float | None = None, **env: object) -> Ran:
        """Run ``oci-builder`` with these arguments; kill it after so many seconds, if it still runs then."""
        assert self._process.stdin is not None
        order = {"argv": [str(a) for a in argv], "log": str(self.log), "env": {k: str(v) for k, v in env.items()}}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid, start = self._line()["pid"], time.monotonic()
        if kill_after is not None:
            _kill(pid, kill_after)
        status = self._line()["status"]
        took = time.monotonic() - start
        return Ran(os.waitstatus_to_exitcode(status), self.log.read_text(errors="replace"), took)


def _kill(pid: int, after: float) -> None:
    """Kill exactly this process, though its number may be another's by then."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            time.sleep(after)
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
