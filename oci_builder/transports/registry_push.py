"""Uploads: a blob in one stream, verified before it is committed; a manifest, read back.

Source: OCI distribution-spec, "Pushing blobs" (POST, PATCH, PUT) and "Pushing manifests".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from urllib.parse import urlencode, urljoin, urlsplit, urlunsplit

from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import IntegrityError, TransportError
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.redact import redact_url
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_http import Response
from oci_builder.transports.registry_manifests import get_manifest

ReadBlob = Callable[[], Iterator[bytes]]
_RETRIED = frozenset({"http.connect", "http.timeout", "http.read", "http.proxy", "http.status"})
_FINAL_STATUS = frozenset({400, 405, 413, 415})


class _Body:
    """A blob's bytes with their length, so that they are sent as they are; judged when the last is sent."""

    def __init__(self, descriptor: Descriptor, read: ReadBlob, emit: Emit, task: str) -> None:
        self._descriptor, self._read, self._emit, self._task = descriptor, read, emit, task

    def __len__(self) -> int:
        return self._descriptor.size

    def __iter__(self) -> Iterator[bytes]:
        hashed, size, expected = hashlib.sha256(), 0, self._descriptor.size
        for chunk in self._read():
            size += len(chunk)
            if size > expected:
                break
            hashed.update(chunk)
            yield chunk
            self._emit(Event("advance", self._task, len(chunk)))
        digest = self._descriptor.digest
        if size != expected:
            raise IntegrityError(
                "blob.size", f"{digest}: {size} bytes on disk, the manifest says {expected}", where=digest,
                expected=expected, actual=size,
            )  # fmt: skip
        actual = Digest.from_hex(hashed.hexdigest())
        if actual != digest:
            raise IntegrityError(
                "blob.digest", f"the bytes on disk hash to {actual}, expected {digest}; nothing was pushed of it",
                where=digest, expected=digest, actual=actual,
            )  # fmt: skip


def upload_blob(client: RegistryClient, descriptor: Descriptor, read: ReadBlob, emit: Emit = silent) -> bool:
    """Upload one blob unless the registry has it. True when bytes were sent. Idempotent.

    Args:
        read: gives the bytes, anew for each try.

    Raises:
        IntegrityError: ``blob.size``, ``blob.digest``: what is on disk is not what it should be; not committed.
        TransportError: ``http.*``, ``auth``. PolicyError: ``http.redirect``.
    """
    task = f"push {descriptor.digest}"
    emit(Event("start", task, total=descriptor.size))
    present = has_blob(client, descriptor)
    if present:
        emit(Event("advance", task, descriptor.size))
    attempt = 0
    while not present:
        attempt += 1
        try:
            present = not _upload(client, descriptor, _Body(descriptor, read, emit, task))
            break
        except TransportError as error:
            final = error.code not in _RETRIED or error.fields.get("actual") in _FINAL_STATUS
            if final or attempt >= client.options.attempts:
                raise
            client.wait(attempt, error.message)
            present = has_blob(client, descriptor)
    emit(Event("done", task))
    return not present


def has_blob(client: RegistryClient, descriptor: Descriptor) -> bool:
    """Whether the registry has a blob of that digest and size.

    Raises:
        TransportError: ``http.*``, ``auth``.
    """
    with client.expect(client.open("HEAD", f"blobs/{descriptor.digest}"), 200, 404) as response:
        stated = response.headers.get("Content-Length", "")
        return response.status == 200 and stated in ("", str(descriptor.size))


def _upload(client: RegistryClient, descriptor: Descriptor, body: _Body) -> bool:
    """False when there was nothing to send after all."""
    place = _begin(client, descriptor)
    if not place:
        return False
    if descriptor.size:
        headers = {"Content-Type": "application/octet-stream"}
        sent = client.open("PATCH", place, headers, lambda: body, retry=False)
        with client.expect(sent, 202, 201, 204) as response:
            place = _location(client, response) if "Location" in response.headers else place
    query = urlsplit(place).query
    final = urlunsplit(urlsplit(place)._replace(query=f"{query}{'&' if query else ''}digest={descriptor.digest}"))
    done = client.open("PUT", final, {"Content-Length": "0"}, retry=False)
    client.expect(done, 201, 204).close()
    if not has_blob(client, descriptor):
        where = descriptor.digest
        raise TransportError("http.status", f"{where}: accepted, but the registry does not have it", where=where)
    return True


def _begin(client: RegistryClient, descriptor: Descriptor) -> str:
    """Where to send a blob; empty when the registry took it from the other repository of its own.

    Source: distribution-spec, "Mounting a blob from another repository". Whoever does not know how answers as to any
    upload; whoever does not like it is asked as for any upload.
    """
    nothing = {"Content-Length": "0"}
    if client.options.mount_from:
        query = urlencode({"mount": str(descriptor.digest), "from": client.options.mount_from})
        with client.open("POST", f"blobs/uploads/?{query}", nothing) as response:
            if response.status == 201 and has_blob(client, descriptor):
                return ""
            if response.status == 202:
                return _location(client, response)
    with client.expect(client.open("POST", "blobs/uploads/", nothing), 202) as response:
        return _location(client, response)


def _location(client: RegistryClient, response: Response) -> str:
    """Where to go on. Another host is checked by the client, and gets no Authorization of ours (C11-08).

    Raises:
        TransportError: ``http.status`` when there is none.
    """
    location = response.headers.get("Location")
    if not location:
        raise TransportError("http.status", f"{redact_url(response.url)}: an upload without a Location", actual=202)
    try:
        return urljoin(response.url or client.url(""), location)
    except ValueError:
        raise TransportError("http.status", f"{redact_url(response.url)}: an upload to nowhere", actual=202) from None


def upload_manifest(client: RegistryClient, data: bytes, media_type: str, name: str) -> Response:
    """Put a manifest under a digest or tag, and read it back. Idempotent; gives the (closed) answer to the PUT.

    Raises:
        IntegrityError: ``blob.digest`` when other bytes come back.
        TransportError: ``http.*``, ``auth``.
    """
    response = client.open("PUT", f"manifests/{name}", {"Content-Type": media_type}, lambda: data)
    client.expect(response, 201, 200, 202, 204).close()
    back, _ = get_manifest(client, name)
    if back != data:
        raise IntegrityError(
            "blob.digest", f"{name}: the registry gives back {Digest.of(back)}, pushed was {Digest.of(data)}",
            where=name, expected=Digest.of(data), actual=Digest.of(back),
        )  # fmt: skip
    return response
