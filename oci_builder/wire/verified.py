"""Streams that do not end well unless they are what they should be.

The rules are umoci's (pkg/hardening): refuse a negative size before reading, never read past one chunk too many, and on
close read what is left and judge the whole, so that nobody stops early and takes half a blob for a good one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from types import TracebackType

from oci_builder.model.digest import Digest
from oci_builder.model.errors import IntegrityError

Chunk = bytes | memoryview


class VerifiedReader:
    """Chunks of a blob whose digest and size are known.

    Iterate, then ``close`` (or use ``with``): only a ``close`` that returns says that the bytes are the blob. Bytes
    beyond ``size`` are never passed on, and no further chunk is pulled once one is there. ``close`` after an error, or
    a second time, does nothing.

    Raises:
        IntegrityError: ``blob.size`` (negative, at once; short or long, when it shows), ``blob.digest`` (at the end).
    """

    __slots__ = ("_chunks", "_done", "_hash", "_left", "digest", "size", "where")

    def __init__(self, chunks: Iterable[Chunk], digest: Digest, size: int, where: str) -> None:
        if size < 0:
            raise IntegrityError("blob.size", f"{where}: a size of {size} bytes", where=where, actual=size)
        self._chunks = iter(chunks)
        self._hash = hashlib.sha256()
        self._left = size
        self._done = False
        self.digest, self.size, self.where = digest, size, where

    def __iter__(self) -> Iterator[Chunk]:
        while not self._done:
            chunk = next(self._chunks, None)
            if chunk is None:
                self._finish()
            elif len(chunk) > self._left:
                self._done = True
                raise self._size_error(f"more than {self.size}")
            elif len(chunk):
                self._left -= len(chunk)
                self._hash.update(chunk)
                yield chunk

    def close(self) -> None:
        """Read to the end and judge. Raises as the class says."""
        for _ in self:
            pass

    def _finish(self) -> None:
        self._done = True
        if self._left:
            raise self._size_error(str(self.size - self._left))
        got = Digest.from_hex(self._hash.hexdigest())
        if got != self.digest:
            raise IntegrityError(
                "blob.digest", f"{self.where}: the bytes hash to {got}, expected {self.digest}; fetch it again",
                where=self.where, expected=self.digest, actual=got,
            )  # fmt: skip

    def _size_error(self, actual: str) -> IntegrityError:
        return IntegrityError(
            "blob.size", f"{self.where}: {actual} bytes, expected {self.size}", where=self.where,
            expected=self.size, actual=actual,
        )  # fmt: skip

    def __enter__(self) -> VerifiedReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        if kind is None:
            self.close()
