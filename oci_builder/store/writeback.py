"""Hand dirty pages to the disk as a file grows, so that the sync at its end finds little left to do."""

from __future__ import annotations

import ctypes

# Often enough that the disk is never idle, rarely enough to write large runs.
_EVERY = 32 << 20
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)


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
