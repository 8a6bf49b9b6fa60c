"""What earlier builds learnt, in one SQLite file: digests of files, layers and blocks by the identity of their input.

A cache only saves work. Whatever is wrong with it (absent, corrupt, locked, read-only, full disk) costs time and never
fails a build; nothing in it is believed about bytes that are not looked at elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_SCHEMA = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS hashes (
    dev INTEGER, ino INTEGER, size INTEGER, mtime INTEGER, ctime INTEGER, sha256 BLOB, PRIMARY KEY (dev, ino)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blocks (
    key BLOB PRIMARY KEY, digest TEXT, offset INTEGER, size INTEGER
) WITHOUT ROWID;
"""
_WAIT_SECONDS = 30.0
_MAGIC, _PAGE = b"SQLite format 3\0", 4096
_SIGN = 1 << 63

Identity = tuple[int, int, int, int, int]
BlockPlace = tuple[str, int, int]


class BuildCache:
    """One build cache. Several threads and processes may use the same file.

    Args:
        path: the file; made when absent, made anew when it is no cache of this version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        for _ in range(2):
            try:
                self._database = _open(path)
                return
            except sqlite3.OperationalError:
                return
            except sqlite3.DatabaseError:
                # Not a database, or of another version: begin again.
                _remove(path)

    def __enter__(self) -> BuildCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; the cache is empty from then on. Idempotent."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database = None

    @contextlib.contextmanager
    def _use(self) -> Iterator[sqlite3.Connection | None]:
        """The open database in a transaction, or None; database errors end the block and nothing else."""
        with self._lock:
            if self._database is None:
                yield None
                return
            with contextlib.suppress(sqlite3.Error), self._database:
                yield self._database

    def known_hashes(self, identities: Sequence[Identity]) -> dict[Identity, bytes]:
        """Digests of file content that are known for exactly these (device, inode, size, mtime_ns, ctime_ns)."""
        found: dict[Identity, bytes] = {}
        wanted = set(identities)
        with self._use() as database:
            if database is not None:
                for dev in {identity[0] for identity in wanted}:
                    rows = database.execute(
                        "SELECT ino, size, mtime, ctime, sha256 FROM hashes WHERE dev = ?", (_signed(dev),)
                    )
                    for ino, size, mtime, ctime, digest in rows:
                        identity = (dev, _unsigned(ino), size, mtime, ctime)
                        if identity in wanted:
                            found[identity] = digest
        return found

    def remember_hashes(self, hashes: Mapping[Identity, bytes]) -> None:
        """Keep digests of file content; an older one for the same inode goes."""
        rows = [(_signed(key[0]), _signed(key[1]), *key[2:], digest) for key, digest in hashes.items()]
        with self._use() as database:
            if database is not None and rows:
                database.executemany("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?, ?)", rows)

    def record(self, key: bytes) -> Any:
        """The JSON value remembered under ``key``, or None."""
        with self._use() as database:
            if database is not None:
                row = database.execute("SELECT value FROM records WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    with contextlib.suppress(ValueError):
                        return json.loads(row[0])
        return None

    def remember(self, key: bytes, value: Any) -> None:
        """Keep a JSON value under ``key``."""
        with self._use() as database:
            if database is not None:
                database.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (key, json.dumps(value)))

    def block(self, key: bytes) -> BlockPlace | None:
        """Where the compressed form of a block lies: (blob digest, offset, size)."""
        with self._use() as database:
            if database is not None:
                row = database.execute("SELECT digest, offset, size FROM blocks WHERE key = ?", (key,)).fetchone()
                return None if row is None else (str(row[0]), int(row[1]), int(row[2]))
        return None

    def remember_blocks(self, blocks: Iterable[tuple[bytes, BlockPlace]]) -> None:
        """Keep places of compressed blocks by key."""
        rows = [(key, *place) for key, place in blocks]
        with self._use() as database:
            if database is not None and rows:
                database.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?)", rows)

    def note_use(self) -> None:
        """The cache is of use now, though nothing new is learnt: pruning goes by the last use."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def forget_blobs(self, keep: Iterable[str]) -> None:
        """Drop what is known of blobs that are gone, and give its room back; ``keep`` are the digests that stay."""
        kept = {"", *keep}
        with self._use() as database:
            if database is not None:
                for (digest,) in database.execute("SELECT DISTINCT digest FROM blocks").fetchall():
                    if digest not in kept:
                        database.execute("DELETE FROM blocks WHERE digest = ?", (digest,))
                for key, value in database.execute("SELECT key, value FROM records").fetchall():
                    with contextlib.suppress(ValueError, AttributeError):
                        if json.loads(value).get("digest", "") not in kept:
                            database.execute("DELETE FROM records WHERE key = ?", (key,))
        with self._lock, contextlib.suppress(sqlite3.Error):
            if self._database is not None:
                self._database.execute("VACUUM")


def is_build_cache(path: Path) -> bool:
    """Whether a file is a build cache, of any version, and nobody else's database."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            head = file.read(_PAGE)
    except OSError:
        return False
    return head.startswith(_MAGIC) and all(b"CREATE TABLE %s" % name in head for name in (b"hashes", b"blocks"))


def _open(path: Path) -> sqlite3.Connection:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, timeout=_WAIT_SECONDS, check_same_thread=False)
    try:
        # Losing the cache in a power cut is fine; a half-written one is still noticed.
        database.execute("PRAGMA synchronous = NORMAL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, _SCHEMA):
            raise sqlite3.DatabaseError("another version")
        with database:
            database.executescript(_TABLES)
            database.execute(f"PRAGMA user_version = {_SCHEMA}")
    except BaseException:
        database.close()
        raise
    return database


def _remove(path: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            Path(f"{path}{suffix}").unlink()


def _signed(number: int) -> int:
    # SQLite integers are signed; device and inode numbers are not (XFS, overlay and fuse use the top bit).
    return number - (_SIGN << 1) if number >= _SIGN else number


def _unsigned(number: int) -> int:
    return number + (_SIGN << 1) if number < 0 else number
