"""Where bytes come from: chunk streams and ranges of open files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Chunks = Iterator[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class FileRange:
    """``size`` bytes at ``offset`` of an open file."""

    fd: int
    offset: int
    size: int

    def pread(self, n: int, at: int) -> bytes:
        """Up to ``n`` bytes at ``at`` of the range; short only at its end."""
        return os.pread(self.fd, max(0, min(n, self.size - at)), self.offset + at)

    def chunks(self, block: int = 1 << 20) -> Iterator[bytes]:
        """All bytes of the range, in order."""
        at = 0
        while at < self.size:
            data = self.pread(block, at)
            if not data:
                return
            yield data
            at += len(data)


def open_range(path: Path) -> FileRange:
    """The whole of a file; the caller closes ``fd``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return FileRange(fd, 0, os.fstat(fd).st_size)


class ChunkReader:
    """Exact reads from a stream of chunks, without copying what is only passed on.

    Attributes:
        offset: bytes consumed so far.
    """

    __slots__ = ("_at", "_chunks", "_end", "_view", "offset")

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks = iter(chunks)
        self._view = memoryview(b"")
        self._at = self._end = 0
        self.offset = 0

    def read_exact(self, n: int) -> bytes:
        """``n`` bytes; fewer only when the stream ends before."""
        at = self._at
        if at + n > self._end:
            return b"".join(self.iter_data(n))
        self._at = at + n
        self.offset += n
        return self._view[at : at + n].tobytes()

    def iter_data(self, n: int) -> Iterator[memoryview]:
        """The next ``n`` bytes as they come; fewer only when the stream ends before."""
        while n > 0 and (self._at < self._end or self._fill()):
            part = self._view[self._at : self._at + n]
            self._at += len(part)
            self.offset += len(part)
            n -= len(part)
            yield part

    def skip(self, n: int) -> int:
        """Pass over ``n`` bytes; returns how many there were."""
        if self._at + n <= self._end:
            self._at += n
            self.offset += n
            return n
        return sum(len(part) for part in self.iter_data(n))

    def rest(self) -> Iterator[memoryview]:
        """Everything up to the end of the stream."""
        while self._at < self._end or self._fill():
            yield from self.iter_data(self._end - self._at)

    def _fill(self) -> bool:
        for chunk in self._chunks:
            if len(chunk):
                self._view = memoryview(chunk)
                self._at, self._end = 0, len(chunk)
                return True
        return False
