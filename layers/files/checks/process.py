"""Programs with a time limit that holds for everything they start."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_KEPT = 1 << 20
# Seconds between two looks at a program that is watched; and for which a killed one is waited for.
EVERY, GRACE = 5.0, 10.0


@dataclass(frozen=True)
class Done:
    """How a program ended: the end of each stream, and what it left running."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    left: int


def become_subreaper() -> None:
    """Orphans of this process's descendants become its children, so that none escapes by a double fork."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True)
class Look:
    """A running program: seconds so far, its processes, the bytes that it wrote to both streams, its last words."""

    seconds: float
    pids: frozenset[int]
    written: int
    words: str = ""


Watch = Callable[[Look], bool]


def run(
    argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None, cwd: str | None = None,
    watch: Watch | None = None,
) -> Done:  # fmt: skip
    """Run a program; at its end, after ``timeout`` seconds, or when this one is interrupted, kill all that it started.

    A program that cannot be started ends with status 127.

    Args:
        watch: asked every few seconds whether to go on waiting; a no counts as the timeout.
    """
    become_subreaper()
    before = descendants(os.getpid())
    started = time.monotonic()
    process = None
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

        def look() -> Look:
            sizes = [os.fstat(file.fileno()).st_size for file in (out, err)]
            # By place: the program writes at the offset that a read would move.
            end = os.pread(err.fileno(), 400, max(0, sizes[1] - 400)).decode("utf-8", "replace")
            words = (end.split("\n") if end.endswith("\n") else [*end.split("\n"), ""])[-2:][0]
            return Look(time.monotonic() - started, descendants(os.getpid()) - before, sum(sizes), words)

        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True
            )
            timed_out = not _ends(process, timeout, watch, look)
            seconds = time.monotonic() - started
        except OSError as error:
            return Done(127, "", f"{argv[0]}: {error.strerror}", 0.0, False, 0)
        finally:
            # Also what an interruption found half started.
            left = kill_tree(process, before)
        status = _status(process)
        return Done(status if status >= 0 else 128 - status, _tail(out), _tail(err), seconds, timed_out, left)


def _ends(process: subprocess.Popen[bytes], timeout: float, watch: Watch | None, look: Callable[[], Look]) -> bool:
    """Wait; whether the program ended by itself."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            process.wait(left if watch is None else min(left, EVERY))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline or (watch is not None and not watch(look())):
                return False
        else:
            return True


def _status(process: subprocess.Popen[bytes]) -> int:
    """How it ended; -9 of one that cannot even be killed, since it hangs inside a driver: nobody waits for that."""
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def kill_tree(process: subprocess.Popen[bytes] | None, spared: frozenset[int]) -> int:
    """Kill the descendants of this process that are not spared, until none is left; how many there were."""
    seen: set[int] = set()
    own = set() if process is None else {process.pid}
    for _ in range(1000):
        found = descendants(os.getpid()) - spared
        if process is not None and process.poll() is not None:
            found -= own
        if not found:
            break
        seen |= found
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _reap(found - own)
        time.sleep(0.01)
    return len(seen - own)


def descendants(root: int) -> frozenset[int]:
    """Processes below one, by /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: set[int] = set()
    new = {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return frozenset(found)


def _reap(pids: frozenset[int]) -> None:
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass


def _tail(file: object) -> str:
    file.seek(0, os.SEEK_END)  # type: ignore[attr-defined]
    size = file.tell()  # type: ignore[attr-defined]
    file.seek(max(0, size - _KEPT))  # type: ignore[attr-defined]
    return str(file.read().decode("utf-8", "replace"))  # type: ignore[attr-defined]
