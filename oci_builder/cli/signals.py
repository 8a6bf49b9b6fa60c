"""A command that is told to end: what it began is taken down first, and its exit status says by which signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

_LIKE_INTERRUPT = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending_statuses() -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP do what Ctrl-C does: temporary files go, what runs elsewhere is told. Then the
    program ends with 128 + the signal's number. Signals that it was told to ignore (as by nohup) stay ignored.

    Call it in the main thread. A second signal changes nothing: the first is being obeyed.
    """
    came: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            raise KeyboardInterrupt

    before = {n: signal.signal(n, end) for n in _LIKE_INTERRUPT if signal.getsignal(n) == signal.SIG_DFL}
    try:
        yield
    except KeyboardInterrupt:
        number = came[0] if came else signal.SIGINT
        click.echo(f"interrupted by {signal.Signals(number).name}", err=True)
        sys.exit(128 + number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
