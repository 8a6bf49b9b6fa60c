"""One sandbox seen from outside: the processes around PID 1, and the answer it sends.

    runner ──fork──► keeper (enters the namespaces) ──fork──► PID 1 (builds, starts the program, reaps)

A death anywhere ends all below: the keeper and PID 1 get SIGKILL with their parent, and the kernel ends a PID
namespace with its PID 1. The mount namespace, and every mount in it, goes with the last of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from chroot_exec import inside, namespaces, process, syscalls
from chroot_exec.errors import RunnerError
from chroot_exec.inside import Job
from chroot_exec.interruption import Interruption

# Seconds that setting up and taking down may take around a program's own time.
_ALLOWANCE = 180.0


def run(job: Job, interruption: Interruption | None = None) -> dict[str, Any]:
    """Run one job in a sandbox of its own.

    Args:
        interruption: ends the sandbox when a signal came; without one, signals are passed on to the program.

    Returns:
        PID 1's answer: ``sandbox``, ``ended``, ``error``, ``stdout``, ``stderr``, ``gpu`` and ``ids``.

    Raises:
        RunnerError: ``sandbox.*`` when there is no answer, ``run.interrupted``.
    """
    answer, answer_end = os.pipe2(os.O_CLOEXEC)
    control, control_end = process.control_pipe()
    hello, hello_end = os.pipe2(os.O_CLOEXEC)
    go, go_end = os.pipe2(os.O_CLOEXEC)
    keeper = os.fork()
    if keeper == 0:
        for fd in (answer, control_end, hello, go_end):
            os.close(fd)
        _keep(job, answer_end, control, hello_end, go)
    for fd in (answer_end, control, hello_end, go):
        os.close(fd)
    try:
        with contextlib.nullcontext() if interruption else _forwarding(control_end):
            ids = _map(keeper, job, hello, go_end)
            data = _read(answer, _limit(job), interruption)
            os.waitpid(keeper, 0)
    finally:
        _end(keeper)
        for fd in (answer, control_end, hello, go_end):
            os.close(fd)
        if job.check is None:
            process.take_terminal(os.getpgrp())
    if not data:
        raise RunnerError("sandbox.died", "the sandbox ended without an answer: killed from outside, or out of memory")
    return {**json.loads(data), "ids": ids}


def _limit(job: Job) -> float | None:
    if job.timeout is None:
        return None
    probe = job.request.gpu.probe_timeout if job.request.gpu else 0
    return job.timeout + probe + _ALLOWANCE


def _map(keeper: int, job: Job, hello: int, go_end: int) -> str:
    if not job.rootless:
        return "identity"
    if not os.read(hello, 1):
        return ""
    ids = namespaces.map_ids(keeper)
    os.write(go_end, b"g")
    return ids


def _read(fd: int, limit: float | None, interruption: Interruption | None) -> bytes:
    awaited = [fd, interruption.fd] if interruption else [fd]
    until = None if limit is None else time.monotonic() + limit
    chunks: list[bytes] = []
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        ready = select.select(awaited, [], [], left)[0]
        if not ready:
            raise RunnerError("sandbox.hung", f"no answer from the sandbox within {limit:.0f} seconds; it was killed")
        if interruption:
            interruption.require_none()
        if fd not in ready:
            continue
        chunk = os.read(fd, 1 << 20)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def _end(keeper: int) -> None:
    """Nothing when it has been waited for; after an error or a hang it must not stay."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(keeper, os.WNOHANG)[0] == 0:
            os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)


@contextlib.contextmanager
def _forwarding(control: int) -> Iterator[None]:
    """While inside, each signal that this process gets goes to the program as a byte through ``control``."""
    # First the pipe: a signal between the two would have a handler, and nobody who hears of it.
    signal.set_wakeup_fd(control, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in process.FORWARDED}
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


def _keep(job: Job, answer: int, control: int, hello: int, go: int) -> NoReturn:
    """The keeper: enter the namespaces, start PID 1, wait for it. Never returns."""
    try:
        for number in process.FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        if job.check:
            os.setsid()
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if job.rootless:
            namespaces.enter_user_namespace()
            os.write(hello, b"h")
            if not os.read(go, 1):
                os._exit(1)
            _become_root()
        namespaces.enter_namespaces(job.request.network, job.rootless)
        first = os.fork()
        if first == 0:
            _first(job, answer, control)
        # Only PID 1 may hold the answer's end: its death is the end of the answer.
        os.close(answer)
        os.waitpid(first, 0)
    except RunnerError as error:
        _say(answer, {"error": {"code": error.code, "message": error.message}})
    except OSError as error:
        _say(answer, {"error": {"code": "sandbox.system", "message": str(error)}})
    finally:
        os._exit(0)


def _become_root() -> None:
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # A change of ids clears it.
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


def _first(job: Job, answer: int, control: int) -> NoReturn:
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        _say(answer, inside.work(job, control))
    finally:
        os._exit(0)


def _say(fd: int, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    while data:
        data = data[os.write(fd, data) :]
