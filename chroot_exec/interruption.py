"""A signal that ends a run of checks: the operator's doing, and no verdict on the check that stood in its way."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from chroot_exec import process
from chroot_exec.errors import RunnerError

# What a terminal, a service manager or a supervisor says to end a program.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(RunnerError):
    """``run.interrupted``: a signal told the runner to end.

    Attributes:
        signal: its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__("run.interrupted", f"interrupted by {signal.Signals(number).name}; what had not ended is open")
        self.signal = number


class Interruption:
    """The signals that came, as bytes in a pipe.

    Attributes:
        fd: becomes readable when a signal came.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._number = 0

    def require_none(self) -> None:
        """Raises Interrupted when a signal that ends the run has come."""
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self.fd, 4096):
                if number in ENDING and not self._number:
                    self._number = number
        if self._number:
            raise Interrupted(self._number)


@contextlib.contextmanager
def watching() -> Iterator[Interruption]:
    """While inside, signals do not end this process but are kept; those that it was told to ignore stay ignored."""
    reader, writer = process.control_pipe()
    os.set_blocking(reader, False)
    watched = [n for n in process.FORWARDED if signal.getsignal(n) != signal.SIG_IGN]
    # First the pipe: a signal between the two would have a handler, and nobody who hears of it.
    wake = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in watched}
    try:
        yield Interruption(reader)
    finally:
        signal.set_wakeup_fd(wake)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
