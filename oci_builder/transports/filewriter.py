"""Write one archive file: appended to, hashed on the way, visible under its name only when complete."""

from __future__ import annotations

import errno
import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from oci_builder.model.digest import Digest
from oci_builder.model.errors import disk_error
from oci_builder.model.events import Emit, Event, silent
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import BLOCK, Kind, TarEntry, encode_header

_COPY = 4 << 20
# What copy_file_range says where it does not work: two kinds of file systems, an old kernel, some network file systems.
_NOT_IN_KERNEL = {
    errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EBADF, errno.ETXTBSY,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """A finished archive: where it is, its digest and its size in bytes."""

    path: Path
    sha256: Digest
    size: int


class FileWriter:
    """Appends to ``<path>.partial``; ``close`` renames it to ``path``, leaving the block with an error removes it.

    Blobs are copied by the kernel while another thread hashes them from the page cache: the time is a copy's, not a
    copy's and a hash's. The file is not synced; its SHA-256 in ``container.json`` is what tells.

    Raises:
        TransportError: ``io.*``.
    """

    def __init__(self, path: Path, emit: Emit = silent) -> None:
        self.path = path
        self._part = path.with_name(f".{path.name}.partial-{os.getpid()}")
        self._emit, self._task = emit, f"write {path.name}"
        self._hash = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, "archive-hash")
        self._pending: Future[None] | None = None
        self._in_kernel = True
        self.size = 0
        try:
            self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
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
        self._wait()
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._hash.update(data)
        self.size += len(data)

    def copy(self, source: FileRange, start: int = 0, size: int | None = None) -> None:
        """Append ``size`` bytes of ``source`` from ``start`` on (default: all)."""
        end = source.size if size is None else start + size
        self._wait()
        self._pending = self._hasher.submit(self._hash_range, source, start, end)
        at = start
        while at < end:
            done = self._move(source, at, min(_COPY, end - at))
            if not done:
                raise OSError(5, "the blob ends early", str(self.path))
            at += done
            self._emit(Event("advance", self._task, done))
        self.size += end - start

    def _move(self, source: FileRange, at: int, size: int) -> int:
        """Let the kernel copy, and where it cannot (two kinds of file systems, an old kernel), read and write."""
        if self._in_kernel:
            try:
                if done := os.copy_file_range(source.fd, self._fd, size, source.offset + at):
                    return done
            except OSError as error:
                if error.errno not in _NOT_IN_KERNEL:
                    raise
            self._in_kernel = False
        data = memoryview(os.pread(source.fd, min(size, _COPY), source.offset + at))
        left = data
        while left:
            left = left[os.write(self._fd, left) :]
        return len(data)

    def close(self) -> ArchiveRecord:
        """Finish and make visible."""
        self._wait()
        os.close(self._fd)
        self._fd = -1
        self._hasher.shutdown()
        os.replace(self._part, self.path)
        return ArchiveRecord(self.path, Digest.from_hex(self._hash.hexdigest()), self.size)

    def _hash_range(self, source: FileRange, start: int, end: int) -> None:
        buffer = bytearray(1 << 20)
        view = memoryview(buffer)
        at = start
        while at < end:
            got = os.preadv(source.fd, [view[: min(len(view), end - at)]], source.offset + at)
            if not got:
                raise OSError(5, "the blob ends early", str(self.path))
            self._hash.update(view[:got])
            at += got

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

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
