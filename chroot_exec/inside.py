"""What PID 1 of a sandbox does, from the first mount to the last process."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict, dataclass
from importlib.machinery import BuiltinImporter, FrozenImporter
from typing import Any

from chroot_exec import identity, inject, namespaces, process, seccomp, syscalls
from chroot_exec.environment import environment
from chroot_exec.errors import RunnerError
from chroot_exec.gpu import Injection
from chroot_exec.mounts import FileSystem
from chroot_exec.protocol import Check, Request
from chroot_exec.resolve import Root
from chroot_exec.teardown import Run


@dataclass(frozen=True)
class Job:
    """One sandbox's work: a check, or (None) the request's ``exec`` with the runner's own streams."""

    request: Request
    check: Check | None
    run: Run
    injection: Injection | None
    rootless: bool

    @property
    def timeout(self) -> float | None:
        """Seconds that the program may take."""
        return self.check.timeout if self.check else None

    @property
    def argv(self) -> tuple[str, ...]:
        """What is started: a check's own words; else the entrypoint and the given or the image's arguments."""
        if self.check:
            return self.check.argv
        config, request = self.request.config, self.request
        start = request.entrypoint if request.entrypoint is not None else tuple(config.get("Entrypoint") or ())
        return (*start, *(request.exec or tuple(config.get("Cmd") or ())))


def work(job: Job, control: int) -> dict[str, Any]:
    """Build the sandbox, run the program in it, and say what happened; errors are part of the answer."""
    out: dict[str, Any] = {"error": None, "ended": None}
    files: FileSystem | None = None
    try:
        os.umask(0o022)
        for number in process.FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        syscalls.set_hostname(job.request.hostname)
        if job.request.network == "none":
            namespaces.raise_loopback()
        files = FileSystem(job.request, job.run.base, job.run.made, job.rootless)
        _run(job, files, control, out)
    except RunnerError as error:
        out["error"] = {"code": error.code, "message": error.message}
    except OSError as error:
        out["error"] = {"code": "sandbox.system", "message": str(error)}
    except Exception as error:
        out["error"] = {"code": "sandbox.internal", "message": repr(error)}
    out["sandbox"] = asdict(files.facts) if files else {}
    return out


def _run(job: Job, files: FileSystem, control: int, out: dict[str, Any]) -> None:
    injection = job.injection
    files.build(injection.nodes if injection else ())
    if injection:
        inject.place(files, injection)
    for twin in job.check.twins if job.check else ():
        files.twin(twin.source, twin.target)
    _check_shm(job.check, files)
    # While the root can still be written to.
    workdir = _workdir(job, files.root)
    files.enter()
    # From here on no file of the host can be opened, and where our modules lay is what the image has there: nothing
    # more is imported. Nor may the payload look into this process.
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder in (BuiltinImporter, FrozenImporter)]
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    root = Root("/")
    who = identity.read_identity(_user(job), root)
    base = environment(job.request.config, _variables(job), who.home, files.facts.note)
    env = base
    if injection:
        extra, out["gpu"] = inject.activate(files, injection, root, base, control)
        env = {**base, **extra}
    if not seccomp.supported():
        files.facts.note("no system call filter for this machine")
    _start(job, files, control, env, who, workdir, out)


def _user(job: Job) -> str:
    return (job.check.user if job.check else "") or job.request.user or job.request.config.get("User") or ""


def _variables(job: Job) -> tuple[dict[str, str], ...]:
    term = {"TERM": os.environ.get("TERM", "xterm")} if job.check is None and os.isatty(0) else {}
    return (term, dict(job.request.env), dict(job.check.env) if job.check else {})


def _check_shm(check: Check | None, files: FileSystem) -> None:
    if check is None or not check.shm:
        return
    fd = files.root.open("/dev/shm")
    info = os.statvfs(f"/proc/self/fd/{fd}")
    os.close(fd)
    size = info.f_blocks * info.f_frsize
    if size < check.shm:
        raise RunnerError("check.shm", f"/dev/shm has {size} bytes, {check.name} needs {check.shm}; raise shm_size")


def _workdir(job: Job, root: Root) -> str:
    asked = (job.check.workdir if job.check else "") or job.request.workdir or job.request.config.get("WorkingDir")
    path = os.path.join("/", asked or "/")
    # Docker makes it when it is missing.
    os.close(root.directory(path))
    return path


def _start(
    job: Job, files: FileSystem, control: int, env: dict[str, str], who: identity.Identity, workdir: str,
    out: dict[str, Any],
) -> None:  # fmt: skip
    if not job.argv:
        raise RunnerError("exec.empty", "nothing to run: no arguments, and the image has neither Entrypoint nor Cmd")
    limit = job.request.output_limit
    captures = (process.Capture(limit), process.Capture(limit)) if job.check else None
    keep_chroot = files.facts.enter == "pivot_root"

    def prepare() -> None:
        identity.become(who, job.request.rlimits, keep_chroot)

    out["started_by"] = {"argv": list(job.argv), "uid": who.uid, "gid": who.gid, "workdir": workdir}
    ended = process.Program(job.argv, env, workdir, prepare, captures).run(job.timeout, control)
    out["ended"] = asdict(ended)
    if captures:
        out["stdout"], out["stderr"] = (c.to_json() for c in captures)
