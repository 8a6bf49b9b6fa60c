"""The standard streams of a process that may have been started with any of them closed, full or gone."""

from __future__ import annotations

import io
import os
import sys


def open_standard_streams() -> None:
    """Give every closed standard stream /dev/null, for the next file that is opened would take its number; and let what
    is said on standard error never decide how the program ends."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one. Programs that are started have it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = _said(sys.stderr.encoding if sys.stderr else "utf-8")


class _Spoken(io.FileIO):
    """A file on a disk that may be full, or a pipe that may have no reader: the exit status then says it all."""

    def write(self, data: object) -> int:
        """Write what there is room for, and claim that it was all."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return len(memoryview(data))  # type: ignore[arg-type]


def _said(encoding: str) -> io.TextIOWrapper:
    file = io.BufferedWriter(_Spoken(2, "wb", closefd=False))
    return io.TextIOWrapper(file, encoding=encoding, errors="backslashreplace", line_buffering=True)
