"""A blob on its way into the store."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from oci_builder.model.digest import Digest
from oci_builder.model.errors import IntegrityError, disk_error, show
from oci_builder.store.writeback import Writeback

if TYPE_CHECKING:

    class _Store(Protocol):
        def admit(self, digest: Digest, part: Path) -> None: ...


_BLOCK = 1 << 20


def lock_part(part: Path, *, wait: bool = True) -> int:
    """Open and lock a partial file. A dead process's lock is gone with it; a living one's is waited for.

    Raises:
        OSError: ``BlockingIOError`` when ``wait`` is false and somebody holds it.
    """
    while True:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # While we waited its holder may have committed it (renamed) or removed it: then the name is another file's.
            if os.fstat(fd).st_ino == _inode(part):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _inode(path: Path) -> int:
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return -1


class Ingest:
    """Bytes being written; made by ``DirStore.ingest``.

    Attributes:
        offset: bytes written so far, those of an earlier process included.
        present: the blob was committed by somebody else meanwhile; write nothing.
    """

    def __init__(self, store: _Store, part: Path, fd: int, expected: Digest | None, size: int | None) -> None:
        self._store, self._part, self._fd = store, part, fd
        self._expected, self._size = expected, size
        self._hash = hashlib.sha256() if expected is not None else None
        self._writeback = Writeback()
        self._finished = False
        self.offset = 0
        self.present = False

    def fileno(self) -> int:
        """The partial file's descriptor, to read what was written."""
        return self._fd

    def resume(self) -> None:
        """Take over what an earlier process wrote, hashing it again. A part that is too long is dropped."""
        size = os.fstat(self._fd).st_size
        if not size or (self._size is not None and size > self._size):
            self.truncate()
            return
        assert self._hash is not None
        while block := os.pread(self._fd, _BLOCK, self.offset):
            self._hash.update(block)
            self.offset += len(block)

    def truncate(self) -> None:
        """Begin again from nothing."""
        try:
            os.ftruncate(self._fd, 0)
        except OSError as error:
            raise disk_error(error, f"writing into the store {show(str(self._part.parent.parent))}") from None
        self.offset = 0
        if self._hash is not None:
            self._hash = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Append.

        Raises:
            IntegrityError: ``blob.size`` when this goes past the expected size (nothing is written then).
            TransportError: ``io.*``.
        """
        if self._size is not None and self.offset + len(data) > self._size:
            raise IntegrityError(
                "blob.size", f"{self._expected}: more than {self._size} bytes", where=self._expected or self._part.name,
                expected=self._size, actual=f"> {self._size}",
            )  # fmt: skip
        view = memoryview(data)
        try:
            while view:
                done = os.pwrite(self._fd, view, self.offset)
                if self._hash is not None:
                    self._hash.update(view[:done])
                self.offset += done
                view = view[done:]
        except OSError as error:
            raise disk_error(error, f"writing into the store {show(str(self._part.parent.parent))}") from None
        self._writeback.grown(self._fd, self.offset)

    def commit(self, digest: Digest | None = None) -> Digest:
        """Sync and make visible. Idempotent for content that is there already.

        Args:
            digest: the caller's own hash of what it wrote, where the ingest has no expected one.

        Raises:
            IntegrityError: ``blob.size``, ``blob.digest``; the partial file is removed.
            TransportError: ``io.*``.
        """
        final = self._judge(digest)
        try:
            os.fdatasync(self._fd)
            self._store.admit(final, self._part)
        except OSError as error:
            raise disk_error(error, "committing a blob") from None
        self._finished = True
        return final

    def _judge(self, digest: Digest | None) -> Digest:
        if self._hash is None:
            if digest is None:
                raise ValueError("an ingest without an expected digest needs one at commit")
            return digest
        assert self._expected is not None
        actual = Digest.from_hex(self._hash.hexdigest())
        if self._size is not None and self.offset != self._size:
            self._discard()
            raise IntegrityError(
                "blob.size", f"{self._expected}: {self.offset} bytes, expected {self._size}; fetch it again",
                where=self._expected, expected=self._size, actual=self.offset,
            )  # fmt: skip
        if actual != self._expected or (digest is not None and digest != actual):
            self._discard()
            raise IntegrityError(
                "blob.digest", f"the bytes hash to {actual}, expected {self._expected}; fetch it again",
                where=self._expected, expected=self._expected, actual=actual,
            )  # fmt: skip
        return actual

    def _discard(self) -> None:
        self._part.unlink(missing_ok=True)
        self._finished = True

    def release(self, *, keep: bool) -> None:
        """Let go of the file; an unfinished one stays only when it can be resumed. Idempotent."""
        if self._fd < 0:
            return
        if not self._finished and not self.present and not (keep and self.offset):
            self._part.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
