"""Locks between processes: on a whole file or a folder, dropped by the kernel when their holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def lock_file(path: Path) -> TextIO:
    """Open a file to lock it, made when absent; no link, and no pipe that would be waited for.

    Raises:
        OSError: it cannot be made or opened.
    """
    try:
        fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.fdopen(os.open(path, _FLAGS | os.O_CREAT, 0o666), "a")
    give_to_owner(fd, path.parent)
    return os.fdopen(fd, "a")


def give_to_owner(made: Path | int, folder: Path | None = None) -> None:
    """What root makes among somebody's files is theirs, who could not open it otherwise.

    Args:
        made: a path, or an open file's descriptor.
        folder: whose owner is meant; by default the one that ``made`` lies in.
    """
    if os.geteuid() == 0:
        with suppress(OSError):
            owner = os.stat(folder if folder is not None else Path(str(made)).parent)
            os.chown(made, owner.st_uid, owner.st_gid)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """While inside, nobody else is inside with this file, which is made when absent. Waits for its turn.

    Raises:
        OSError: the file cannot be made, or its file system has no locks.
    """
    with lock_file(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def alone_now(path: Path) -> Iterator[bool]:
    """As ``alone``, but gives False at once where somebody else is inside."""
    with lock_file(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def alone_in(folder: Path, *, wait: bool = True) -> Iterator[int]:
    """While inside, nobody else is inside with this folder, which is there; gives its descriptor. Not to be nested.

    Raises:
        OSError: it is no folder, or its file system has no locks; ``BlockingIOError``: somebody is inside, and ``wait``
            is false.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield fd
    finally:
        os.close(fd)


def hold(path: Path) -> BinaryIO:
    """Say that a file is in use, for as long as what is returned stays open; any number of processes may.

    Raises:
        OSError: the file cannot be read.
    """
    file = path.open("rb")
    # On a file system without locks nobody can be told.
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


def in_use(path: Path) -> bool:
    """Whether anybody holds a file (``hold``). An absent one is held by nobody.

    Raises:
        OSError: the file cannot be opened.
    """
    try:
        # Network file systems lock exclusively only what is open for writing.
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False
