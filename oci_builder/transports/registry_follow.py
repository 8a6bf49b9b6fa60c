"""Decompress a layer while it is still coming, so that its diff_id is known when its last byte is here.

Only a shortcut: what is found is kept once the same bytes are committed, and whatever goes wrong here is found again,
and reported, when the committed blob is proved the ordinary way.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import OciBuilderError
from oci_builder.model.limits import Limits
from oci_builder.store.blobs import DirStore
from oci_builder.store.ingest import Ingest
from oci_builder.wire.compress import Compression, Options, decode_chunks, sniff

_BLOCK = 1 << 20


class Follower:
    """Reads behind the writer of an ingest. Use ``with``; a layer of unknown compression is not followed."""

    def __init__(self, descriptor: Descriptor, ingest: Ingest, limits: Limits) -> None:
        self._descriptor, self._limits = descriptor, limits
        self._news = threading.Condition()
        self._here = ingest.offset
        self._aborted = False
        self._found: tuple[Digest, int] | None = None
        self._compression: Compression | None = _compression(descriptor)
        self._fd = os.dup(ingest.fileno())
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)

    def __enter__(self) -> Follower:
        if self._compression is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        if kind is not None or self._here < self._descriptor.size:
            self.abort()
        if self._compression is not None:
            self._thread.join()
        os.close(self._fd)

    def reached(self, offset: int) -> None:
        """The ingest holds ``offset`` bytes now. Fewer than before means that it began again: not followed then."""
        with self._news:
            self._aborted |= offset < self._here
            self._here = offset
            self._news.notify()

    def abort(self) -> None:
        """Stop following. Idempotent."""
        with self._news:
            self._aborted = True
            self._news.notify()

    def keep(self, store: DirStore) -> None:
        """Remember what was found, the bytes being committed; after the ``with`` block."""
        if self._found is not None and not self._aborted:
            digest, size = self._found
            store.remember(self._descriptor.id, "tar", {"diff_id": digest, "tar_size": size})

    def _run(self) -> None:
        assert self._compression is not None
        hashed, size = hashlib.sha256(), 0
        options = Options(self._limits, str(self._descriptor.digest))
        with suppress(OciBuilderError, OSError):
            for chunk in decode_chunks(self._chunks(), self._compression, options):
                hashed.update(chunk)
                size += len(chunk)
            self._found = Digest.from_hex(hashed.hexdigest()), size

    def _chunks(self) -> Iterator[bytes]:
        at, total = 0, self._descriptor.size
        while at < total:
            self._wait_for(min(total, at + _BLOCK))
            data = os.pread(self._fd, _BLOCK, at)
            if not data or (at == 0 and sniff(data) != self._compression):
                raise OSError("not as expected")
            yield data
            at += len(data)

    def _wait_for(self, offset: int) -> None:
        with self._news:
            self._news.wait_for(lambda: self._aborted or self._here >= offset)
            if self._aborted:
                raise OSError("no longer followed")


def _compression(descriptor: Descriptor) -> Compression | None:
    match media.LAYER_COMPRESSION.get(descriptor.media_type):
        case "gzip":
            return "gzip"
        case "zstd":
            return "zstd"
        case "identity":
            return "identity"
    return None
