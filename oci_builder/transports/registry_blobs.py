"""Blobs of a registry into the store: hashed while they come, resumed where they broke off.

Source: OCI distribution-spec, "Pulling blobs"; RFC 9110 section 14 for ranges.
"""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field
from typing import Protocol

from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import IntegrityError, TransportError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.store.blobs import DirStore
from oci_builder.store.ingest import Ingest
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_follow import Follower
from oci_builder.transports.registry_http import Response
from oci_builder.transports.registry_pace import Pace

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\Z")
_RETRIED = frozenset({"http.connect", "http.timeout", "http.read", "http.range", "http.proxy"})


class Sink(Protocol):
    """Takes a blob's bytes; an ``Ingest`` is one."""

    @property
    def offset(self) -> int: ...
    def write(self, data: bytes | memoryview, /) -> None: ...
    def truncate(self) -> None: ...


class Stop:
    """Ends downloads of several threads: one has failed, or somebody gave up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Response] = set()
        self.asked = False

    def ask(self) -> None:
        """End all downloads now. Idempotent."""
        with self._lock:
            self.asked = True
            for response in self._open:
                response.interrupt()

    def enter(self, response: Response) -> None:
        """A download begins.

        Raises:
            TransportError: ``http.stopped``.
        """
        with self._lock:
            self._open.add(response)
        self.check()

    def leave(self, response: Response) -> None:
        """A download is over."""
        with self._lock:
            self._open.discard(response)

    def check(self) -> None:
        """Raise once it was asked to stop.

        Raises:
            TransportError: ``http.stopped``.
        """
        if self.asked:
            raise TransportError("http.stopped", "stopped, as another part of the same pull failed")


@dataclass(slots=True)
class _Download:
    """One blob on its way."""

    client: RegistryClient
    descriptor: Descriptor
    emit: Emit
    stop: Stop
    follow: bool
    follower: Follower | None = None
    ranges: bool = True
    resumed: bool = False
    task: str = field(init=False)

    def __post_init__(self) -> None:
        self.task = f"pull {self.descriptor.digest}"


def fetch_blob(
    client: RegistryClient, descriptor: Descriptor, store: DirStore, emit: Emit = silent, stop: Stop | None = None,
    *, follow: bool = False,
) -> None:  # fmt: skip
    """Get one blob into the store. Idempotent; a partial one of an earlier process is continued.

    Success means that the bytes in the store have the descriptor's digest and size.

    Args:
        follow: a layer that will be proved: decompress it while it comes, and remember its diff_id.

    Raises:
        IntegrityError: ``blob.digest``, ``blob.size``: the server sends other bytes; nothing of them is kept.
        TransportError: ``http.*``, ``auth``, ``io.*``; what came so far is kept for the next run.
        PolicyError: ``http.redirect``.
    """
    download = _Download(client, descriptor, emit, stop or Stop(), follow)
    emit(Event("start", download.task, total=descriptor.size))
    try:
        _into_store(download, store)
    except IntegrityError:
        # A prefix from an earlier process may have been another blob's (B079): once more, from nothing.
        if not download.resumed:
            raise
        emit(Event("note", download.task, message="what an earlier run left does not fit; beginning again"))
        _into_store(download, store)
    emit(Event("done", download.task))


def prove_blob(client: RegistryClient, descriptor: Descriptor, emit: Emit = silent) -> None:
    """Read one blob to its end and compare its digest; nothing is kept.

    Raises:
        IntegrityError: ``blob.digest``, ``blob.size``. TransportError: ``http.*``, ``auth``.
    """
    download = _Download(client, descriptor, emit, Stop(), follow=False)
    emit(Event("start", download.task, total=descriptor.size))
    hashed = _Hashed(descriptor)
    _download(download, hashed)
    hashed.require()
    emit(Event("done", download.task))


class _Hashed:
    """Hashes what a blob's bytes are, and forgets them."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self.truncate()

    def truncate(self) -> None:
        self.offset, self._hash = 0, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self.offset += len(data)
        self._hash.update(data)
        if self.offset > self._descriptor.size:
            self.require()

    def require(self) -> None:
        actual, wanted = Digest.from_hex(self._hash.hexdigest()), self._descriptor
        if self.offset != wanted.size or actual != wanted.digest:
            code = "blob.size" if self.offset != wanted.size else "blob.digest"
            raise IntegrityError(
                code, f"{wanted.digest}: the registry gives other bytes", where=wanted.digest,
                expected=wanted.digest, actual=actual,
            )  # fmt: skip


def _into_store(download: _Download, store: DirStore) -> None:
    descriptor = download.descriptor
    with store.ingest(descriptor.digest, descriptor.id, descriptor.size) as ingest:
        if ingest.present:
            download.emit(Event("advance", download.task, descriptor.size))
            return
        download.resumed = ingest.offset > 0
        if download.resumed:
            download.emit(Event("advance", download.task, ingest.offset))
        try:
            if download.follow:
                _followed(download, ingest, store)
            else:
                _download(download, ingest)
                ingest.commit()
        except IntegrityError:
            ingest.truncate()
            raise


def _followed(download: _Download, ingest: Ingest, store: DirStore) -> None:
    with Follower(download.descriptor, ingest, download.client.options.limits) as follower:
        download.follower = follower
        _download(download, ingest)
        ingest.commit()
    follower.keep(store)


def _download(download: _Download, ingest: Sink) -> None:
    """Try until all bytes are there; tries count only as long as nothing new comes."""
    attempt, best, size = 0, ingest.offset, download.descriptor.size
    while ingest.offset < size:
        try:
            _attempt(download, ingest)
            if ingest.offset < size:
                raise _short(download, ingest.offset)
        except TransportError as error:
            download.stop.check()
            attempt = 1 if ingest.offset > best else attempt + 1
            best = max(best, ingest.offset)
            if error.code not in _RETRIED or attempt >= download.client.options.attempts:
                raise
            download.client.wait(attempt, error.message)


def _short(download: _Download, offset: int) -> TransportError:
    size = download.descriptor.size
    return TransportError(
        "http.read", f"{download.descriptor.digest}: the connection ended after {offset} of {size} bytes",
        where=download.descriptor.digest, expected=size, actual=offset,
    )  # fmt: skip


def _attempt(download: _Download, ingest: Sink) -> None:
    """One request, and as much of its body as comes."""
    offset = ingest.offset if download.ranges else 0
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    response = download.client.open("GET", f"blobs/{download.descriptor.digest}", headers)
    if response.status == 416 and offset:
        response.close()
        _begin_again(download, ingest, "the server cannot give the rest")
    response = download.client.expect(response, 200, 206)
    try:
        download.stop.enter(response)
        skip = _position(response, offset, download, ingest)
        _copy(response, skip, download, ingest)
    finally:
        download.stop.leave(response)
        response.close()


def _position(response: Response, offset: int, download: _Download, ingest: Sink) -> int:
    """Where the body belongs: how many of its bytes are here already.

    A 200 is the whole blob whatever was asked for (B076); a 206 says where it starts, which may be earlier (B077).
    """
    size = download.descriptor.size
    if response.status == 200:
        stated = response.headers.get("Content-Length", "")
        if stated.isascii() and stated.isdigit() and int(stated[:19]) != size:
            raise _encoded(_size_error(download, int(stated[:19])), response)
        if ingest.offset:
            ingest.truncate()
        return 0
    found = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
    if not found or not offset:
        _begin_again(download, ingest, "the server does not say which part it sends")
        return 0
    start, total = int(found[1]), found[3]
    if start > offset:
        _begin_again(download, ingest, f"asked for bytes from {offset}, got bytes from {start}")
    if total != "*" and int(total) != size:
        _begin_again(download, ingest, f"the server says {total} bytes, the manifest {size}")
    return offset - start


def _size_error(download: _Download, actual: int) -> IntegrityError:
    digest, size = download.descriptor.digest, download.descriptor.size
    return IntegrityError(
        "blob.size", f"{digest}: the registry has {actual} bytes, the manifest says {size}", where=digest,
        expected=size, actual=actual,
    )  # fmt: skip


def _begin_again(download: _Download, ingest: Sink, why: str) -> None:
    """From nothing, and without ranges.

    Raises:
        TransportError: ``http.range``, always.
    """
    ingest.truncate()
    download.ranges = False
    digest = download.descriptor.digest
    raise TransportError("http.range", f"{digest}: {why}", where=digest)


def _copy(response: Response, skip: int, download: _Download, ingest: Sink) -> None:
    pace = Pace(download.client.options.limits.blob_idle_seconds, str(download.descriptor.digest))
    if download.follower:
        download.follower.reached(ingest.offset)
    for data in response.chunks():
        download.stop.check()
        pace.count(len(data))
        part = memoryview(data)[skip:]
        skip -= min(skip, len(data))
        if len(part):
            try:
                ingest.write(part)
            except IntegrityError as error:
                raise _encoded(error, response) from None
            if download.follower:
                download.follower.reached(ingest.offset)
            download.emit(Event("advance", download.task, len(part)))


def _encoded(error: IntegrityError, response: Response) -> IntegrityError:
    encoding = response.headers.get("Content-Encoding", "")
    if encoding in ("", "identity"):
        return error
    text = f"{error.message} (the server says Content-Encoding {show(encoding[:60])}; blobs are taken as they are)"
    return IntegrityError(error.code, text, **error.fields)
