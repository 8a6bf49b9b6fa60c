"""SHA-256 of files that are what a scan saw; also a program of its own, so that many are hashed on several CPUs.

Standard library only, as a program: ``python -I -S scan_hash.py`` answers each marshalled list of ``Wanted`` on its
input with a marshalled list of digests. Processes because threads would wait for each other: a small file is a few
short system calls, and Python's lock changes hands at each. 100,000 files on two idle cores took 6.2 s of CPU in two
threads and 2.6 s in one, neither of them sooner than the other.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
from typing import Any, BinaryIO

# The place; then device, inode, size, times of change and of status change (ns), and link count as the scan saw them.
Wanted = tuple[bytes, int, int, int, int, int, int]

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_READ = 1 << 20


def digest(wanted: Wanted) -> bytes:
    """SHA-256 of a file's content, ``b""`` when it cannot be read or is not what the scan saw, before and after."""
    try:
        descriptor = open_file(wanted[0])
        try:
            if difference(os.fstat(descriptor), *wanted[1:]):
                return b""
            found = sha256_of(descriptor, wanted[3])
            return b"" if difference(os.fstat(descriptor), *wanted[1:]) else found
        finally:
            os.close(descriptor)
    except OSError:
        return b""


def sha256_of(descriptor: int, size: int) -> bytes:
    """SHA-256 of an open file of ``size`` bytes, or of what it has become.

    Raises:
        OSError: it cannot be read.
    """
    hashed = hashlib.sha256()
    # No more memory than the file needs: a whole block costs mapping and unmapping it.
    while data := os.read(descriptor, min(size + 1, _READ)):
        hashed.update(data)
    return hashed.digest()


def open_file(place: bytes) -> int:
    """A descriptor for reading: no link is followed, no fifo waited for, no time of access set where that can be.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        return os.open(place, _OPEN | os.O_NOATIME)
    except PermissionError:
        # O_NOATIME is for the owner only.
        return os.open(place, _OPEN)


def difference(now: os.stat_result, dev: int, ino: int, size: int, mtime_ns: int, ctime_ns: int, nlink: int) -> str:
    """How an open file is not what the scan saw (C8-13), for people; ``""`` when it is."""
    if now.st_dev != dev or now.st_ino != ino:
        return "was replaced"
    if now.st_size != size:
        return f"went from {size} to {now.st_size} bytes"
    # Linking a file into another environment (uv does, from its cache) moves ctime and leaves the content alone.
    if now.st_mtime_ns != mtime_ns or (now.st_ctime_ns != ctime_ns and now.st_nlink <= 1 and nlink <= 1):
        return "was written to"
    return ""


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the input ends."""
    while True:
        try:
            batch: Any = marshal.load(source)
        except EOFError:
            return
        marshal.dump([digest(wanted) for wanted in batch], sink)
        sink.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
