"""To the disk: a file or folder at once, or a file's pages while it grows, so that its sync finds little left to do."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# Often enough that the disk is never idle, rarely enough to write large runs.
_EVERY = 32 << 20
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)


def sync(path: Path) -> None:
    """What a file holds, or which names a folder has, is on the disk.

    Raises:
        OSError: the disk.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Writeback:
    """Of one file that is only appended to. It asks the kernel, which may say no: only the final sync is a promise."""

    def __init__(self) -> None:
        self._started = 0

    def grown(self, descriptor: int, size: int) -> None:
        """The file has ``size`` bytes now (fewer than before: it was cut)."""
        if size - self._started >= _EVERY:
            _libc.sync_file_range(
                descriptor, ctypes.c_int64(self._started), ctypes.c_int64(size - self._started),
                ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
            )  # fmt: skip
            self._started = size
        elif size < self._started:
            self._started = size
