"""Run a command as a whole process tree and say what it took."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Run:
    """What a command took: seconds of wall clock and CPU (user and system, all children), peak memory in MiB."""

    wall: float
    cpu: float
    peak: float

    def __add__(self, other: Run) -> Run:
        return Run(self.wall + other.wall, self.cpu + other.cpu, max(self.peak, other.peak))


NOTHING = Run(0.0, 0.0, 0.0)


class Failed(RuntimeError):
    """A command that did not end with 0."""


def run(argv: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Run:
    """Run ``argv`` to its end; its output is shown only when it fails."""
    started = time.monotonic()
    process = subprocess.Popen(
        [str(a) for a in argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.monotonic() - started
    if process.returncode:
        tail = output.decode(errors="replace")[-2000:]
        raise Failed(f"{' '.join(str(a) for a in argv)[:300]}: status {process.returncode}\n{tail}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def shell(line: str, env: Mapping[str, str] | None = None) -> Run:
    """Run a shell line with pipefail."""
    return run(["bash", "-euo", "pipefail", "-c", line], env)


def ours(*argv: str | Path) -> Run:
    """Run our command line with this interpreter."""
    return run([sys.executable, "-c", "from oci_builder.cli import main; main()", *argv])


def have(*programs: str) -> bool:
    """Whether all of these are installed."""
    return all(shutil.which(p) for p in programs)


def size(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def warm(*paths: Path) -> None:
    """Read everything once, so that each contestant finds the same page cache."""
    for path in paths:
        shell(f"find {str(path)!r} -type f -print0 | xargs -0 cat > /dev/null")
