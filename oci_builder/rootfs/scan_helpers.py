"""Processes that hash files beside this one (``scan_hash``)."""

from __future__ import annotations

import contextlib
import marshal
import subprocess
import sys
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from oci_builder.rootfs import scan_hash
from oci_builder.rootfs.scan_hash import Wanted

_ARGV = [sys.executable, "-I", "-S", scan_hash.__file__]


class Helpers:
    """``count`` processes, 0 for none. What cannot be had of one, or dies with it, is done in the caller's thread."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()

    def __enter__(self) -> Helpers:
        pipe = subprocess.PIPE
        with contextlib.suppress(OSError):
            for _ in range(self._count):
                process = subprocess.Popen(_ARGV, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
                self._processes.append(process)
                self._free.put(process)
        return self

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            with contextlib.suppress(OSError):  # what a dead one was not told
                process.communicate()

    def digests(self, wanted: list[Wanted]) -> list[bytes]:
        """Digests of files, ``b""`` for each that cannot be read or has changed. Threads may ask at the same time."""
        found: Any = None
        if self._processes:
            process = self._free.get()
            try:
                found = _ask(process, wanted)
            finally:
                self._free.put(process)
        return [scan_hash.digest(one) for one in wanted] if found is None else found


def _ask(process: subprocess.Popen[bytes], wanted: list[Wanted]) -> list[bytes] | None:
    """The answer of a process; ``None`` when it gives none."""
    assert process.stdin is not None and process.stdout is not None
    try:
        marshal.dump(wanted, process.stdin)
        process.stdin.flush()
        found: list[bytes] = marshal.load(process.stdout)
    except (OSError, EOFError, ValueError, TypeError):
        return None
    return found if isinstance(found, list) and len(found) == len(wanted) else None
