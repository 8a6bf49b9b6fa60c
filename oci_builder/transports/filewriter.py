"""Write one archive file: appended to, hashed on the way, visible under its name only when complete."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from oci_builder.model.digest import Digest
from oci_builder.model.errors import disk_error, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.store.writeback import Writeback
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import BLOCK, Kind, TarEntry, encode_header

# What is hashed and written at a time; a multiple of every disk's block, as writing past the page cache asks for.
_BLOCK = 1 << 20
_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """A finished archive: where it is, its digest and its size in bytes."""

    path: Path
    sha256: Digest
    size: int


@dataclass(slots=True)
class _Block:
    """Memory on its way into the file, and what is still being done with it."""

    memory: mmap.mmap
    pending: tuple[Future[None], ...] = ()

    def settle(self) -> None:
        """Wait until it is free again.

        Raises:
            OSError: it could not be written.
        """
        for done in self.pending:
            done.result()
        self.pending = ()


class FileWriter:
    """Appends to ``<path>.partial``; ``close`` syncs it and renames it to ``path``, an error removes it.

    One thread hashes and another one writes what this one reads, from the same memory: the time is that of the slowest
    of the three. The page cache is passed by where the file system lets us: an archive is larger than what one wants
    in memory, and with a full cache finding a place for its pages costs more CPU than hashing it.

    Raises:
        TransportError: ``io.*``.
    """

    def __init__(self, path: Path, emit: Emit = silent) -> None:
        self.path = path
        self._part = path.with_name(f".{path.name}.partial-{os.getpid()}")
        self._emit, self._task = emit, f"write {path.name}"
        self._hash = hashlib.sha256()
        # One thread each: pieces are hashed, and written, in order.
        self._hasher, self._writer = (ThreadPoolExecutor(1, f"archive-{name}") for name in ("hash", "write"))
        # Anonymous mappings begin at a page.
        self._blocks: deque[_Block] = deque(_Block(mmap.mmap(-1, _BLOCK)) for _ in range(_BLOCKS))
        self._filled = 0
        self._writeback = Writeback()
        self.size = 0
        try:
            self._fd = _create(self._part)
        except OSError as error:
            self._stop()
            raise disk_error(error, _doing(path)) from None

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None) -> None:
        if self._fd >= 0:
            self._abandon()
        if isinstance(error, OSError):
            raise disk_error(error, _doing(self.path)) from None

    def write(self, data: bytes) -> None:
        """Append bytes."""
        left = memoryview(data)
        while left:
            room = self._room(len(left))
            room[:] = left[: len(room)]
            left = left[len(room) :]
            self._advance(len(room))

    def copy(self, source: FileRange, start: int = 0, size: int | None = None) -> None:
        """Append ``size`` bytes of ``source`` from ``start`` on (default: all)."""
        at = source.offset + start
        end = at + (source.size - start if size is None else size)
        while at < end:
            done = os.preadv(source.fd, [self._room(end - at)], at)
            if not done:
                raise OSError(errno.EIO, "the blob ends early", str(self.path))
            self._advance(done)
            at += done
            self._emit(Event("advance", self._task, done))

    def _room(self, most: int) -> memoryview:
        """The free rest of the current block."""
        block = self._blocks[0]
        block.settle()
        return memoryview(block.memory)[self._filled : self._filled + most]

    def _advance(self, size: int) -> None:
        self._filled += size
        self.size += size
        if self._filled == _BLOCK:
            self._flush()

    def _flush(self) -> None:
        """Have the current block hashed and written; the next one is the one for which that was asked longest ago."""
        data = memoryview(self._blocks[0].memory)[: self._filled]
        self._blocks[0].pending = (
            self._hasher.submit(self._hash.update, data),
            self._writer.submit(self._write, data, self.size),
        )
        self._blocks.rotate(-1)
        self._filled = 0

    def _write(self, data: memoryview, end: int) -> None:
        while data:
            data = data[self._put(data) :]
        self._writeback.grown(self._fd, end)

    def _put(self, data: memoryview) -> int:
        try:
            return os.write(self._fd, data)
        except OSError as error:
            # A file system that wants other multiples than ours.
            if error.errno != errno.EINVAL or not _through_cache(self._fd):
                raise
            return os.write(self._fd, data)

    def close(self) -> ArchiveRecord:
        """Finish and make visible."""
        if self._filled:
            self._writer.submit(_through_cache, self._fd)
            self._flush()
        for block in self._blocks:
            block.settle()
        os.fdatasync(self._fd)
        os.close(self._fd)
        self._fd = -1
        self._stop()
        os.replace(self._part, self.path)
        return ArchiveRecord(self.path, Digest.from_hex(self._hash.hexdigest()), self.size)

    def _abandon(self) -> None:
        self._stop()
        os.close(self._fd)
        self._fd = -1
        self._part.unlink(missing_ok=True)

    def _stop(self) -> None:
        for pool in (self._hasher, self._writer):
            pool.shutdown(wait=True, cancel_futures=True)


def _doing(path: Path) -> str:
    """What failed, with the folder: which disk is full or read-only is the first thing that one wants to know."""
    return f"writing {path.name} in {show(str(path.parent))}"


def _create(path: Path) -> int:
    """A new file, opened to be written past the page cache where the file system knows that."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)


def _through_cache(descriptor: int) -> bool:
    """Write through the page cache from now on; False when that is so already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


def member_header(name: str, size: int) -> bytes:
    """Header of an archive member: a file of root's, 0644, time 0, no names (containers/image#1017)."""
    return encode_header(TarEntry(name=name.encode(), kind=Kind.FILE, size=size, mode=0o644))


def folder_header(name: str) -> bytes:
    """Header of a folder in an archive."""
    return encode_header(TarEntry(name=name.encode(), kind=Kind.DIR, mode=0o755))


def small_member(name: str, data: bytes) -> bytes:
    """A whole small member: header, content, padding."""
    return member_header(name, len(data)) + data + bytes(-len(data) % BLOCK)
