"""PID 1 of a sandbox: starts one program, forwards signals, keeps its output, and takes the whole tree down."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import selectors
import signal
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from chroot_exec.errors import RunnerError
from chroot_exec.programs import enter_folder, explain, find_program, require_inside

# Signals that are passed on to the program.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Seconds between SIGTERM and SIGKILL when time is up.
GRACE = 2.0
_DRAIN = 1.0
# Seconds: epoll(7) counts milliseconds in 32 bits, a check's own time may be longer.
_LONGEST_WAIT = 3600.0
_STATUS_NOT_EXECUTABLE = 126
_STATUS_NOT_FOUND = 127
# Less than PIPE_BUF: it is written before anybody reads.
_LONGEST_REPORT = 4000


class Capture:
    """Digest and count of a stream's bytes, and at most ``limit`` of them: half from the begin, half from the end."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._digest = hashlib.sha256()
        self.size = 0

    def feed(self, data: bytes) -> None:
        """Take more bytes."""
        self._digest.update(data)
        self.size += len(data)
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[max(room, 0) :]
        if len(self._tail) > self._half:
            del self._tail[: len(self._tail) - self._half]

    @property
    def truncated(self) -> bool:
        """Whether bytes in the middle were dropped."""
        return self.size > len(self._head) + len(self._tail)

    @property
    def kept(self) -> bytes:
        """What was kept, with a line that says so in the place of what was not."""
        dropped = self.size - len(self._head) - len(self._tail)
        gap = b"\n[... %d bytes not kept ...]\n" % dropped if dropped else b""
        return bytes(self._head) + gap + bytes(self._tail)

    def to_json(self) -> dict[str, object]:
        """The receipt's form."""
        return {
            "bytes": self.size,
            "sha256": self._digest.hexdigest(),
            "truncated": self.truncated,
            "text": self.kept.decode("utf-8", "backslashreplace"),
        }


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        status: exit status, or 128 + the signal's number.
        signal: number of the signal that ended it, or 0.
        timed_out: whether it was ended because its time was up.
        left: how many other processes still ran at its end; they were killed.
        start_error: errno of an exec that failed, or 0.
        start_message: which program could not be started, and why or where it was looked for; else empty.
    """

    status: int
    signal: int
    timed_out: bool
    left: int
    seconds: float
    start_error: int = 0
    start_message: str = ""


class Program:
    """One program under PID 1.

    Args:
        argv, env, workdir: what to start, and where.
        prepare: called in the new process before exec; turns it into the payload's user.
        captures: of standard output and error; None lets the program have this process's own streams.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], workdir: str, prepare: Callable[[], None],
        captures: tuple[Capture, Capture] | None,
    ) -> None:  # fmt: skip
        self._argv, self._env, self._workdir = list(argv), dict(env), workdir
        self._prepare, self._captures = prepare, captures
        self._selector = selectors.DefaultSelector()
        self._status: int | None = None
        self._pid = 0

    def run(self, timeout: float | None, control: int) -> Ended:
        """Start it and wait for its end, at most ``timeout`` seconds; signals from ``control`` are passed on.

        Raises:
            RunnerError: ``exec.start``: what had to happen before exec failed.
        """
        wake = self._listen(control)
        started = time.monotonic()
        report = self._start()
        deadline = started + timeout if timeout is not None else None
        timed_out = self._wait(deadline)
        seconds = time.monotonic() - started
        left = self._kill_rest()
        self._drain()
        signal.set_wakeup_fd(-1)
        for fd in wake:
            os.close(fd)
        error, message = _read_report(report)
        status = self._status or 0
        code = -os.waitstatus_to_exitcode(status) if os.WIFSIGNALED(status) else 0
        plain = 128 + code if code else os.waitstatus_to_exitcode(status)
        return Ended(plain, code, timed_out, left, seconds, error, message)

    def _listen(self, control: int) -> tuple[int, int]:
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._selector.register(reader, selectors.EVENT_READ, self._reap)
        self._selector.register(control, selectors.EVENT_READ, self._forward)
        return reader, writer

    def _start(self) -> int:
        """Fork and exec; returns the pipe that a failure before or in exec is written to."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        streams = [os.pipe2(os.O_CLOEXEC) for _ in self._captures or ()]
        self._pid = os.fork()
        if self._pid == 0:
            self._become([w for _, w in streams], writer)
        os.close(writer)
        for (stream, end), capture in zip(streams, self._captures or (), strict=True):
            os.close(end)
            os.set_blocking(stream, False)
            self._selector.register(stream, selectors.EVENT_READ, self._feeder(capture))
        return reader

    def _become(self, streams: list[int], report: int) -> None:
        try:
            self._detach(streams)
            # Also those that the caller ignores, and SIGPIPE and SIGXFSZ, which Python does.
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            # While everything can be read: a user may be allowed to run what it may not read.
            require_inside(self._argv[0], self._env.get("PATH", os.defpath), self._workdir)
            self._prepare()
            self._execute(report)
        except RunnerError as error:
            os.write(report, f"{error.code} {error.message}".encode("utf-8", "backslashreplace")[:_LONGEST_REPORT])
        except OSError as error:
            _write_errno(report, error, f"the process could not become the program's user: {error}")
        except BaseException as error:
            os.write(report, f"exec.start {error!r}".encode()[:_LONGEST_REPORT])
        finally:
            os._exit(_STATUS_NOT_FOUND)

    def _execute(self, report: int) -> None:
        path = self._env.get("PATH", os.defpath)
        try:
            enter_folder(self._workdir)
        except OSError as error:
            _write_errno(report, error, f"cannot enter the working folder {self._workdir!r}: {error.strerror}")
            return
        try:
            os.execve(find_program(self._argv[0], path), self._argv, self._env)
        except OSError as error:
            _write_errno(report, error, explain(self._argv[0], path, error))

    def _detach(self, streams: list[int]) -> None:
        if streams:
            os.setsid()
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(streams[0], 1)
            os.dup2(streams[1], 2)
            return
        # A group of its own that owns the terminal: keys then signal the program once, and not through us as well.
        os.setpgid(0, 0)
        take_terminal(os.getpgrp())

    def _feeder(self, capture: Capture) -> Callable[[int], None]:
        def feed(fd: int) -> None:
            try:
                data = os.read(fd, 1 << 18)
            except BlockingIOError:
                return
            if data:
                capture.feed(data)
            else:
                self._selector.unregister(fd)
                os.close(fd)

        return feed

    def _forward(self, control: int) -> None:
        numbers = os.read(control, 64)
        if not numbers:
            # The runner outside is gone.
            os._exit(1)
        for number in numbers:
            with contextlib.suppress(OSError):
                os.kill(self._pid, number)

    def _reap(self, wake: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
                if pid == 0:
                    return
                if os.WIFSTOPPED(status):
                    # Nobody here could ever continue a program that was stopped from the keyboard.
                    os.kill(pid, signal.SIGCONT)
                elif pid == self._pid:
                    self._status = status

    def _wait(self, deadline: float | None) -> bool:
        timed_out = False
        while self._status is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                _kill_all(signal.SIGKILL if timed_out else signal.SIGTERM)
                deadline = None if timed_out else time.monotonic() + GRACE
                timed_out = True
                continue
            self._turn(left)
        return timed_out

    def _turn(self, timeout: float | None) -> bool:
        ready = self._selector.select(None if timeout is None else min(timeout, _LONGEST_WAIT))
        for key, _ in ready:
            key.data(key.fd)
        return bool(ready)

    def _kill_rest(self) -> int:
        left = _others()
        _kill_all(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        return left

    def _drain(self) -> None:
        """Read what is still in the pipes; every writer is dead. Only waiting has an end, however slow we are."""
        until = time.monotonic() + _DRAIN
        while len(self._selector.get_map()) > 2 and self._turn(max(0.0, until - time.monotonic())):
            pass
        self._selector.close()


def take_terminal(group: int) -> None:
    """Make a process group the foreground group of the terminal on standard input, if there is one."""
    old = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        if os.isatty(0):
            os.tcsetpgrp(0, group)
    except (OSError, termios.error):
        pass
    finally:
        signal.signal(signal.SIGTTOU, old)


def _kill_all(number: int) -> None:
    # As PID 1 this reaches every process of the namespace and nobody else.
    with contextlib.suppress(OSError):
        os.kill(-1, number)


def _others() -> int:
    count = 0
    if os.readlink("/proc/self") != "1":
        return 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                count += file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    return count


def _write_errno(fd: int, error: OSError, message: str) -> None:
    os.write(fd, f"errno {error.errno or errno.EIO} {message}".encode("utf-8", "backslashreplace")[:_LONGEST_REPORT])


def _read_report(fd: int) -> tuple[int, str]:
    with open(fd, "rb") as file:
        kind, _, text = file.read().decode("utf-8", "replace").partition(" ")
    if not kind:
        return 0, ""
    if kind == "errno":
        number, _, message = text.partition(" ")
        return int(number), message
    raise RunnerError(kind, text)


def start_status(error: int) -> int:
    """Exit status for an exec that failed, as shells give it."""
    return _STATUS_NOT_FOUND if error in (errno.ENOENT, errno.ENOTDIR) else _STATUS_NOT_EXECUTABLE


def control_pipe() -> tuple[int, int]:
    """A pipe whose write end can be the target of ``signal.set_wakeup_fd``: signal numbers travel as bytes."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)
    return reader, writer
