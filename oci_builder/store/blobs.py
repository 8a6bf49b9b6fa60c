"""A content-addressed store in a folder: ingest, then commit; nothing is visible before.

The layout of ``blobs/`` is an OCI layout's. A blob that is being written stands in ``ingest/`` under a lock, and a dead
process leaves at most a partial file there, which the next one resumes or removes. After containerd's content store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.errors import IntegrityError, disk_error, read_error
from oci_builder.model.events import Emit, Event, silent
from oci_builder.store.ingest import Ingest, lock_part
from oci_builder.store.records import Records
from oci_builder.store.writeback import sync
from oci_builder.wire.source import FileRange

_BLOCK = 1 << 20


class DirStore:
    """Blobs in a folder, shared safely by threads and processes.

    A committed blob is trusted while its size, times and inode are as they were at commit. Else it is hashed again,
    and put into ``quarantine/`` when it is no longer what its name says. A disk that rots changes none of these:
    who ships blobs has them ``prove``d.

    Args:
        root: the store's folder; made when absent.
        work: where all but ``blobs/`` is kept (default: ``root``); on the same file system, as blobs are renamed.

    Raises:
        TransportError: ``io.*``.
    """

    def __init__(self, root: Path, work: Path | None = None) -> None:
        self.root = root.absolute()
        self.work = self.root if work is None else work.absolute()
        self._blobs = self.root / "blobs" / "sha256"
        self._ingest = self.work / "ingest"
        try:
            for folder in (self._blobs, self._ingest, self.work / "records"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, "making the store") from None
        self._records = Records(self.work / "records")
        self._open: dict[Digest, FileRange] = {}
        self._used: set[Digest] = set()
        self._hashed: set[Digest] = set()

    @property
    def used(self) -> frozenset[Digest]:
        """The blobs that were looked for and found, or made, since the store was opened."""
        return frozenset(self._used)

    def note_use(self, digests: Iterable[Digest]) -> None:
        """These blobs are of use now, though nobody reads them: pruning goes by the last use."""
        for digest in digests:
            self._records.touch(digest)

    def close(self) -> None:
        """Close the blobs that ``open`` opened. Idempotent."""
        while self._open:
            os.close(self._open.popitem()[1].fd)

    def __enter__(self) -> DirStore:
        self.sweep()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path(self, digest: Digest) -> Path:
        """Where the blob lies, whether it is there or not."""
        return self._blobs / Digest.parse(digest).hex

    def has(self, digest: Digest) -> bool:
        """Whether the blob is there and still what its name says."""
        try:
            self._trusted(digest)
        except IntegrityError:
            return False
        return True

    def size(self, digest: Digest) -> int:
        """Bytes of a blob.

        Raises:
            IntegrityError: as ``open``.
        """
        return self._trusted(digest).st_size

    def open(self, digest: Digest) -> FileRange:
        """The blob's bytes. The store keeps the file open and closes it with itself.

        Raises:
            IntegrityError: ``blob.missing``; ``blob.digest`` when it is corrupt (it is put aside and gone afterwards).
            TransportError: ``io.*``.
        """
        status = self._trusted(digest)
        known = self._open.get(digest)
        if known is None or os.fstat(known.fd).st_ino != status.st_ino:
            try:
                fd = os.open(self.path(digest), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                raise disk_error(error, "opening a blob") from None
            known = self._open[digest] = FileRange(fd, 0, status.st_size)
        return known

    def read(self, digest: Digest, limit: int) -> bytes:
        """A small blob, whole.

        Raises:
            IntegrityError: as ``open``; ``blob.size`` when it is larger than ``limit``.
        """
        blob = self.open(digest)
        if blob.size > limit:
            raise IntegrityError("blob.size", f"{digest}: {blob.size} bytes, expected at most {limit}", where=digest)
        return blob.pread(blob.size, 0)

    def put(self, data: bytes) -> Digest:
        """Store a small blob; idempotent."""
        digest = Digest.of(data)
        if not self.has(digest):
            with self.ingest(f"put-{digest.hex}", digest, len(data)) as ingest:
                if not ingest.present:
                    ingest.truncate()
                    ingest.write(data)
                    ingest.commit()
        return digest

    @contextlib.contextmanager
    def ingest(self, ref: str, expected: Digest | None = None, size: int | None = None) -> Iterator[Ingest]:
        """Write a blob. Only ``commit`` makes it visible.

        With ``expected`` the bytes are hashed here and checked at commit, an interrupted ingest is resumed at
        ``offset`` (the prefix hashed again), and a second process waits and then finds the blob ``present``. Without,
        the caller vouches for the digest it commits, and an interrupted ingest leaves nothing.

        Raises:
            IntegrityError: ``blob.size``, ``blob.digest`` from ``commit``; the partial file is gone then.
            TransportError: ``io.*``.
        """
        name = f"sha256-{expected.hex}" if expected is not None else f"{_safe(ref)}-{os.getpid()}-{time.time_ns()}"
        part = self._ingest / f"{name}.part"
        try:
            fd = lock_part(part)
        except OSError as error:
            raise disk_error(error, "opening a file in the store") from None
        ingest = Ingest(self, part, fd, expected, size)
        try:
            if expected is not None and self.has(expected):
                ingest.present = True
                part.unlink(missing_ok=True)
            elif expected is not None:
                ingest.resume()
            yield ingest
        finally:
            ingest.release(keep=expected is not None)

    def admit(self, digest: Digest, part: Path) -> None:
        """Make a finished, synced file visible as a blob; called by ``Ingest.commit``."""
        os.replace(part, self.path(digest))
        sync(self._blobs)
        self._records.vouch(digest, os.stat(self.path(digest)))
        self._used.add(digest)
        self._hashed.add(digest)

    def remember(self, digest: Digest, key: str, value: Any) -> None:
        """Keep a small JSON value beside a blob; lost with it."""
        self._records.put(digest, key, value)

    def recall(self, digest: Digest, key: str) -> Any:
        """What was remembered, or ``None``."""
        return self._records.get(digest, key)

    def digests(self) -> list[Digest]:
        """All blobs, sorted."""
        return sorted(Digest.from_hex(p.name) for p in self._blobs.iterdir() if re.fullmatch("[0-9a-f]{64}", p.name))

    def prove(self, digests: Iterable[Digest], emit: Emit = silent) -> None:
        """Hash those of the blobs that were not hashed since the store was opened: times are all that vouches for them.

        Raises:
            IntegrityError: as ``open``.
        """
        for digest in sorted(set(digests)):
            status = self._trusted(digest)
            if digest not in self._hashed:
                task = f"check {digest[:19]}"
                emit(Event("start", task, total=status.st_size))
                if (actual := _hash_file(self.path(digest), emit, task)) != digest:
                    self._quarantine(digest, actual)
                self._hashed.add(digest)
                emit(Event("done", task))

    def check_all(self) -> list[Digest]:
        """Hash every blob again; returns the corrupt ones, which are in quarantine afterwards."""
        bad = []
        for digest in self.digests():
            self._records.doubt(digest)
            if not self.has(digest):
                bad.append(digest)
        return bad

    def gc(self, keep: Iterable[Digest]) -> list[Digest]:
        """Remove blobs that are not kept, and partial files that no living process holds. Returns the removed."""
        kept = set(keep)
        gone = [digest for digest in self.digests() if digest not in kept]
        for digest in gone:
            self.remove(digest)
        self.sweep()
        return gone

    def remove(self, digest: Digest) -> None:
        """Remove a blob, and what was remembered beside it; absent is fine.

        Raises:
            OSError: the disk; the blob stays then.
        """
        self.path(digest).unlink(missing_ok=True)
        self._records.drop(digest)

    def sweep(self) -> None:
        """Remove what dead processes left of ingests that cannot be resumed."""
        for part in self._ingest.glob("*.part"):
            if not part.name.startswith("sha256-"):
                with contextlib.suppress(OSError):
                    fd = lock_part(part, wait=False)
                    part.unlink(missing_ok=True)
                    os.close(fd)

    def _trusted(self, digest: Digest) -> os.stat_result:
        """The blob's status once its bytes are known to be right."""
        path = self.path(digest)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            raise IntegrityError("blob.missing", f"{digest} is not in the store {self.root}", where=digest) from None
        except OSError as error:
            raise disk_error(error, "looking for a blob") from None
        if not stat.S_ISREG(status.st_mode):
            self._quarantine(digest, "not a file")
        if not self._records.vouches(digest, status):
            actual = _hash_file(path)
            if actual != digest:
                self._quarantine(digest, actual)
            self._records.vouch(digest, status)
            self._hashed.add(digest)
        if digest not in self._used:
            self._used.add(digest)
            self._records.touch(digest)
        return status

    def _quarantine(self, digest: Digest, actual: str) -> None:
        folder = self.work / "quarantine"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            os.replace(self.path(digest), folder / f"{digest.hex}-{time.time_ns()}")
        self._records.drop(digest)
        self._hashed.discard(digest)
        raise IntegrityError(
            "blob.digest", f"{digest} in the store is corrupt and was put into {folder}; run again to get it anew",
            where=digest, expected=digest, actual=actual,
        )  # fmt: skip


def _safe(ref: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", ref)[:80]


def _hash_file(path: Path, emit: Emit = silent, task: str = "") -> Digest:
    hashed = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                hashed.update(block)
                emit(Event("advance", task, len(block)))
    except OSError as error:
        raise read_error(error, "reading a blob") from None
    return Digest.from_hex(hashed.hexdigest())


def layout_marker() -> bytes:
    """The content of an OCI layout's ``oci-layout`` file (image-layout.md)."""
    return json.dumps({"imageLayoutVersion": "1.0.0"}, separators=(",", ":")).encode()
