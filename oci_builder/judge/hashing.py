"""SHA-256 beside the work, in order, in bounded memory."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from oci_builder.model.digest import Digest

_AHEAD = 6
_SMALL = 16 << 10


class SideHash:
    """Hashes chunks in a thread of its own. Chunks must not change after they are given."""

    __slots__ = ("_hash", "_pending", "_pool", "size")

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        """``pool`` must have one thread: it is what keeps the order."""
        self._hash = hashlib.sha256()
        self._pending: deque[Future[None]] = deque()
        self._pool = pool
        self.size = 0

    def update(self, chunk: bytes | memoryview) -> None:
        """Add a chunk."""
        self.size += len(chunk)
        if len(chunk) < _SMALL and not self._pending:
            self._hash.update(chunk)
            return
        self._pending.append(self._pool.submit(self._hash.update, chunk))
        if len(self._pending) > _AHEAD:
            self._pending.popleft().result()

    def tee(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """``chunks``, hashed on their way."""
        for chunk in chunks:
            self.update(chunk)
            yield chunk

    def digest(self) -> Digest:
        """The digest of everything so far."""
        while self._pending:
            self._pending.popleft().result()
        return Digest.from_hex(self._hash.hexdigest())


class Hashers:
    """The three hashing threads of a verification: the file, the blob in it, the tar in that."""

    __slots__ = ("_pools",)

    def __init__(self) -> None:
        self._pools = {name: ThreadPoolExecutor(1, f"sha256-{name}") for name in ("file", "blob", "tar")}

    def new(self, name: str) -> SideHash:
        """A hash on the thread ``file``, ``blob`` or ``tar``."""
        return SideHash(self._pools[name])

    def __enter__(self) -> Hashers:
        return self

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
