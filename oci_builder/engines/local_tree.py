"""A stage's processes as one tree with one end: a time limit, and nothing left over, whatever sessions they make."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from chroot_exec import syscalls

# Exit status of a supervisor whose stage was not done in time, as timeout(1) has it.
LATE = 124
_PR_SET_CHILD_SUBREAPER = 36
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def supervise(run: Callable[[], int], limit: float, grace: float, runner: int | None = None) -> int:
    """Fork; the child runs ``run`` and exits with its answer. Call it while this process has one thread.

    This process adopts every orphan below it, so at the end (the child's, the limit's, or a signal's) all that came
    from the child can be found and ended. A child that is asked to end has ``grace`` seconds to take things down.

    Args:
        limit: seconds.
        runner: process whose end ends this one; where it has ended already, nothing is run.

    Returns: the child's exit status (128 + N for signal N), or ``LATE``.
    """
    syscalls.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)
    if runner is not None and os.getppid() != runner:
        return 128 + signal.SIGTERM
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *_ENDING})
    child = os.fork()
    if child == 0:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *_ENDING})
        os._exit(_exit_status(run))
    status, why = _wait(child, time.monotonic() + limit)
    if status is None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        status, _ = _wait(child, time.monotonic() + grace, signals=False)
    end_descendants()
    if why == "limit":
        return LATE
    return 128 + signal.SIGKILL if status is None else status


def _exit_status(run: Callable[[], int]) -> int:
    try:
        return run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        # The last thing this process does: nobody above would print it.
        traceback.print_exc()
        return 70


def _wait(child: int, deadline: float, signals: bool = True) -> tuple[int | None, str]:
    """(status, "") once the child has ended; (None, why) at the deadline (``limit``) or at a signal (``signal``)."""
    wanted = {signal.SIGCHLD, *(_ENDING if signals else ())}
    while True:
        ended = _reap()
        if child in ended:
            return _status(ended[child]), ""
        left = deadline - time.monotonic()
        if left <= 0:
            return None, "limit"
        found = signal.sigtimedwait(wanted, left)
        if found is not None and found.si_signo != signal.SIGCHLD:
            return None, "signal"


def _reap() -> dict[int, int]:
    """Processes that have ended by now -> their wait status."""
    out: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            out[pid] = status
    return out


def _status(raw: int) -> int:
    code = os.waitstatus_to_exitcode(raw)
    return code if code >= 0 else 128 - code


def descendants(of: int) -> list[int]:
    """All processes below one."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                # The name may hold spaces and brackets: the parent is the second field after the last one.
                parent = int(Path("/proc", entry, "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
                children[parent].append(int(entry))
    out: list[int] = []
    todo = [of]
    while todo:
        found = children[todo.pop()]
        out += found
        todo += found
    return out


def end_descendants() -> None:
    """Kill and reap everything below this process. A process that forks meanwhile is met in the next round."""
    for _ in range(1000):
        left = descendants(os.getpid())
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        if not left:
            return
        time.sleep(0.01)
