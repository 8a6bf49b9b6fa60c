"""A folder for the time of one piece of work, beside its results; what dead processes left is cleared away."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oci_builder.store.removal import clear_folder


@contextmanager
def scratch_folder(parent: Path, prefix: str = ".staging-") -> Iterator[Path]:
    """A new folder in ``parent``, gone afterwards. Folders with the prefix whose maker is dead go first.

    Only its maker's user can look into it. The maker holds a lock on it for as long as it lives, so ``kill -9`` costs
    disk space only until the next run, and two runs at once leave each other's alone.

    Raises:
        OSError: the folder cannot be made.
    """
    for left in parent.glob(f"{prefix}*"):
        _clear(left)
    folder, lock = _make(parent, prefix)
    try:
        yield folder
    finally:
        clear_folder(folder)
        os.close(lock)


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    for attempt in range(1000):
        folder = parent / f"{prefix}{os.getpid()}-{attempt}"
        with suppress(FileExistsError, FileNotFoundError):
            folder.mkdir(0o700)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another run may have seen it unlocked, and cleared it away.
            if folder.exists():
                return folder, lock
            os.close(lock)
    raise FileExistsError(17, "too many staging folders", str(parent))


def _clear(folder: Path) -> None:
    """Remove a folder that nobody holds. What cannot be removed stays: it is in nobody's way."""
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clear_folder(folder)
        finally:
            os.close(lock)
