"""Removing trees: by descriptor, never through a link, never across a mount."""

from __future__ import annotations

import errno
import os
import stat

from oci_builder.model.errors import TransportError, show

_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Spare:
    """What a removal leaves: nothing, unless a subclass says otherwise."""

    def keeps(self, _folder: int, _name: bytes) -> bool:
        """Whether ``name`` in the folder with this inode number stays."""
        return False

    def is_clean(self, _folder: int) -> bool:
        """Whether all that may be removed below the folder with this inode number is; from now on it is."""
        return False

    def stays(self, _folder: int) -> None:
        """Told the inode number of a folder that stays only because of something below it."""


NOTHING = Spare()


def remove_entry(folder: int, name: bytes, spare: Spare = NOTHING) -> bool:
    """Remove ``name`` in the open ``folder``, and all below it that is not spared.

    Returns:
        False when it stays, because it or something below it is spared.

    Raises:
        TransportError: ``io.busy`` at a mount point; nothing in it was removed.
        OSError: as the system calls do.
    """
    return _remove(folder, os.fstat(folder), name, spare)


def _remove(folder: int, above: os.stat_result, name: bytes, spare: Spare) -> bool:
    status = os.lstat(name, dir_fd=folder)
    spared = spare.keeps(above.st_ino, name)
    if not stat.S_ISDIR(status.st_mode):
        if not spared:
            os.unlink(name, dir_fd=folder)
        return not spared
    if status.st_dev != above.st_dev:
        raise _busy(name)
    empty = _remove_children(folder, name, status, spare)
    if spared or not empty:
        if not spared:
            spare.stays(status.st_ino)
        return False
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as error:
        raise (_busy(name) if error.errno == errno.EBUSY else error) from None
    return True


def _remove_children(folder: int, name: bytes, status: os.stat_result, spare: Spare) -> bool:
    if spare.is_clean(status.st_ino):
        return False
    fd = _open(folder, name)
    try:
        gone = [_remove(fd, status, os.fsencode(child), spare) for child in os.listdir(fd)]
    finally:
        os.close(fd)
    return all(gone)


def _open(folder: int, name: bytes) -> int:
    try:
        return os.open(name, _LIST, dir_fd=folder)
    except PermissionError:
        # A folder of ours with the mode that an image gave it.
        os.chmod(name, 0o700, dir_fd=folder)
        return os.open(name, _LIST, dir_fd=folder)


def _busy(name: bytes) -> TransportError:
    return TransportError(
        "io.busy", f"{show(name)}: something is mounted here; unmount it, then remove the folder", where=show(name)
    )
