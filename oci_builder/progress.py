"""Render events: bars on a terminal, JSON lines for programs, nothing when piped. The one file that imports rich."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TextIO, cast

from oci_builder.model.events import Emit, Event
from oci_builder.model.redact import redact, secret_values
from oci_builder.model.sizes import human

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, TaskID

_NARROW = 76


@contextmanager
def rendering(how: str = "auto", *, verbose: bool = False, stream: TextIO | None = None) -> Iterator[Emit]:
    """An ``Emit`` that writes to ``stream`` (default: standard error) while the block runs.

    Args:
        how: ``bars``, ``json``, ``none``, or ``auto``: bars on a terminal, else none. Warnings are always written.
        verbose: write notes too.
    """
    out = cast(TextIO, _Tolerant(stream or sys.stderr))
    if how == "json":
        yield _hiding(_Json(out))
    elif how == "bars" or (how == "auto" and out.isatty()):
        with _Bars(out, verbose) as bars:
            yield _hiding(bars)
    else:
        yield _hiding(_Plain(out, verbose))


def _hiding(emit: Emit) -> Emit:
    """``emit`` that gets no secret of this process's environment, and nothing that looks like one."""
    secrets = secret_values(os.environ)

    @lru_cache(maxsize=1024)
    def hide(text: str) -> str:
        return redact(text, secrets)

    def passed_on(event: Event) -> None:
        emit(replace(event, task=hide(event.task), message=hide(event.message)))

    return passed_on


class _Tolerant:
    """A stream that may break: its reader is gone, or the disk of a log is full. The work that is told of goes on."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            return self._out.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._out.flush()


class _Json:
    """One line an event; ``advance`` at most about every 0.1 s would lose totals, so none is dropped."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._lock = out, threading.Lock()

    def __call__(self, event: Event) -> None:
        line = json.dumps({key: value for key, value in asdict(event).items() if value not in ("", 0)})
        with self._lock:
            self._out.write(line + "\n")
            self._out.flush()


class _Plain:
    """Warnings, and notes when asked for."""

    def __init__(self, out: TextIO, verbose: bool) -> None:
        self._out, self._verbose = out, verbose

    def __call__(self, event: Event) -> None:
        if event.kind == "warning" or (event.kind == "note" and self._verbose):
            self._out.write(f"{event.kind}: {event.task}: {event.message}\n")


class _Bars:
    """A bar a task, with bytes, speed and time."""

    def __init__(self, out: TextIO, verbose: bool) -> None:
        # Here, for a command without a terminal has no use for it and starts faster.
        from rich.console import Console
        from rich.progress import Progress

        self._verbose = verbose
        console = Console(file=out)
        self._progress = Progress(*_columns(console.width), console=console, transient=False, expand=True)
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event.kind == "warning" or (event.kind == "note" and self._verbose):
                self._progress.console.print(
                    f"{event.kind}: {event.task}: {event.message}", markup=False, highlight=False
                )
            elif event.kind == "start" and event.unit == "B":
                known = self._tasks.get(event.task)
                if known is None:
                    self._tasks[event.task] = self._progress.add_task(event.task, total=event.total or None)
                else:
                    self._progress.reset(known, total=event.total or None)
            elif event.task in self._tasks:
                self._step(self._tasks[event.task], event)

    def _step(self, task: TaskID, event: Event) -> None:
        if event.kind == "advance":
            self._progress.advance(task, event.amount)
        elif event.kind == "done":
            done = self._progress.tasks[self._progress.task_ids.index(task)].completed
            self._progress.update(task, total=done, completed=done)


def _columns(width: int) -> list[ProgressColumn]:
    """What fits into a line of a terminal, never wrapped: on a narrow one, a share in place of bytes and speed."""
    from rich import progress
    from rich.table import Column
    from rich.text import Text

    def whole() -> Column:
        return Column(no_wrap=True)

    class Speed(progress.TransferSpeedColumn):
        """As it is now, or of a task that has ended: on the whole. Nothing where nobody knows."""

        def render(self, task: progress.Task) -> Text:
            on_the_whole = task.completed / task.elapsed if task.finished and task.elapsed else 0
            speed = on_the_whole or task.speed or 0
            return Text(f"{human(int(speed))}/s" if speed else "", style="progress.data.speed")

    bar = progress.BarColumn(None, table_column=Column(ratio=1))
    if width < _NARROW:
        name = progress.TextColumn("{task.description:.20}", table_column=Column(no_wrap=True, ratio=2))
        return [name, bar, progress.TaskProgressColumn(table_column=whole())]
    return [
        progress.TextColumn("{task.description:<30.30}", table_column=whole()), bar,
        progress.DownloadColumn(table_column=whole()), Speed(table_column=whole()),
        progress.TimeElapsedColumn(table_column=whole()),
    ]  # fmt: skip
