"""Write one archive file: appended to, hashed on the way, visible under its name only when complete."""

from __future__ import annotations

import errno
import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from oci_builder.model.digest import Digest
from oci_builder.model.errors import disk_error
from oci_builder.model.events import Emit, Event, silent
from oci_builder.store.writeback import Writeback
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import BLOCK, Kind, TarEntry, encode_header

# What is read, hashed and written at a time, and how much of it may wait for the hash.
_PIECE = 1 << 20
_WAITING = 4


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """A finished archive: where it is, its digest and its size in bytes."""

    path: Path
    sha256: Digest
    size: int


class FileWriter:
    """Appends to ``<path>.partial``; ``close`` syncs it and renames it to ``path``, an error removes it.

    Another thread hashes what this one writes, from the same memory: the time is the longer one's of a copy and a
    hash, not both.

    Raises:
        TransportError: ``io.*``.
    """

    def __init__(self, path: Path, emit: Emit = silent) -> None:
        self.path = path
        self._part = path.with_name(f".{path.name}.partial-{os.getpid()}")
        self._emit, self._task = emit, f"write {path.name}"
        self._hash = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, "archive-hash")
        self._pending: deque[tuple[Future[None], bytearray | None]] = deque()
        self._writeback = Writeback()
        self.size = 0
        try:
            self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._hasher.shutdown()
            raise disk_error(error, f"writing {path.name}") from None

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None) -> None:
        if self._fd >= 0:
            self._abandon()
        if isinstance(error, OSError):
            raise disk_error(error, f"writing {self.path.name}") from None

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._buffer()
        self._append(memoryview(data), None)

    def copy(self, source: FileRange, start: int = 0, size: int | None = None) -> None:
        """Append ``size`` bytes of ``source`` from ``start`` on (default: all)."""
        at = source.offset + start
        end = at + (source.size - start if size is None else size)
        while at < end:
            buffer = self._buffer() or bytearray(_PIECE)
            view = memoryview(buffer)[: end - at]
            done = os.preadv(source.fd, [view], at)
            if not done:
                raise OSError(errno.EIO, "the blob ends early", str(self.path))
            self._append(view[:done], buffer)
            at += done
            self._emit(Event("advance", self._task, done))

    def _buffer(self) -> bytearray | None:
        """A buffer that is hashed and written, once there are enough of them."""
        return self._settle() if len(self._pending) >= _WAITING else None

    def _append(self, data: memoryview, buffer: bytearray | None) -> None:
        self._pending.append((self._hasher.submit(self._hash.update, data), buffer))
        self.size += len(data)
        while data:
            data = data[os.write(self._fd, data) :]
        self._writeback.grown(self._fd, self.size)

    def _settle(self) -> bytearray | None:
        hashed, buffer = self._pending.popleft()
        hashed.result()
        return buffer

    def close(self) -> ArchiveRecord:
        """Finish and make visible."""
        while self._pending:
            self._settle()
        os.fdatasync(self._fd)
        os.close(self._fd)
        self._fd = -1
        self._hasher.shutdown()
        os.replace(self._part, self.path)
        return ArchiveRecord(self.path, Digest.from_hex(self._hash.hexdigest()), self.size)

    def _abandon(self) -> None:
        self._hasher.shutdown(wait=True, cancel_futures=True)
        os.close(self._fd)
        self._fd = -1
        self._part.unlink(missing_ok=True)


def member_header(name: str, size: int) -> bytes:
    """Header of an archive member: a file of root's, 0644, time 0, no names (containers/image#1017)."""
    return encode_header(TarEntry(name=name.encode(), kind=Kind.FILE, size=size, mode=0o644))


def folder_header(name: str) -> bytes:
    """Header of a folder in an archive."""
    return encode_header(TarEntry(name=name.encode(), kind=Kind.DIR, mode=0o755))


def small_member(name: str, data: bytes) -> bytes:
    """A whole small member: header, content, padding."""
    return member_header(name, len(data)) + data + bytes(-len(data) % BLOCK)
