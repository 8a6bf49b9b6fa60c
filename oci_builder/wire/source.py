"""Where bytes come from: chunk streams and ranges of open files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

Chunks = Iterator[bytes | memoryview]

_BLOCK = 1 << 18


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


class Ahead:
    """Runs an iterator in a thread of its own, a few chunks ahead of whoever iterates over this.

    Chunks and the error that ended the stream come in order. ``close`` stops the thread (and the iterator, where it can
    be closed); use ``with``.
    """

    def __init__(self, chunks: Iterable[bytes | memoryview], depth: int = 4) -> None:
        self._queue: Queue[bytes | memoryview | BaseException | None] = Queue(depth)
        self._stop = False
        self._thread = Thread(target=self._run, args=(iter(chunks),), name="ahead", daemon=True)
        self._thread.start()

    def _run(self, chunks: Iterator[bytes | memoryview]) -> None:
        end: BaseException | None = None
        try:
            for chunk in chunks:
                self._queue.put(chunk)
                if self._stop:
                    break
        except BaseException as error:
            end = error
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()
            self._queue.put(end)

    def __iter__(self) -> Iterator[bytes | memoryview]:
        while True:
            item = self._queue.get()
            if isinstance(item, bytes | memoryview):
                yield item
                continue
            self._queue.put(item)  # for whoever asks again
            if item is not None:
                raise item
            return

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._stop = True
        while self._thread.is_alive():
            with contextlib.suppress(Empty):
                self._queue.get(timeout=0.01)
            self._thread.join(0)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChunkReader:
    """Exact reads from a stream of chunks, without copying what is only passed on.

    Of a ``FileRange``, what is skipped is not read.

    Attributes:
        offset: bytes consumed so far.
    """

    __slots__ = ("_at", "_chunks", "_end", "_range", "_view", "offset")

    def __init__(self, chunks: Iterable[bytes | memoryview] | FileRange) -> None:
        self._range = chunks if isinstance(chunks, FileRange) else None
        self._chunks: Iterator[bytes | memoryview] = iter(()) if isinstance(chunks, FileRange) else iter(chunks)
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
        if self._range is not None:
            n = min(n, self._range.size - self.offset)
            self._at = self._end = 0
            self.offset += n
            return n
        return sum(len(part) for part in self.iter_data(n))

    def rest(self) -> Iterator[memoryview]:
        """Everything up to the end of the stream."""
        while self._at < self._end or self._fill():
            yield from self.iter_data(self._end - self._at)

    def _fill(self) -> bool:
        if self._range is not None:
            self._chunks = iter((self._range.pread(_BLOCK, self.offset),))
        for chunk in self._chunks:
            if len(chunk):
                self._view = memoryview(chunk)
                self._at, self._end = 0, len(chunk)
                return True
        return False
