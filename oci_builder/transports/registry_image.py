"""An image into a registry, and out of it again: what ``push`` and ``publish`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import IntegrityError
from oci_builder.model.events import Emit
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_blobs import prove_blob
from oci_builder.transports.registry_manifests import get_manifest
from oci_builder.transports.registry_push import upload_blob, upload_manifest
from oci_builder.transports.registry_source import PushBlob, PushSource

T = TypeVar("T")
R = TypeVar("R")


def push_image(client: RegistryClient, source: PushSource, names: Iterable[str], emit: Emit) -> int:
    """Blobs, then the manifest under its digest and each name; every one is asked for again. Idempotent.

    Returns: how many blobs were sent; the others were there.

    Raises:
        IntegrityError: ``blob.*``; nothing is named then. TransportError: ``http.*``, ``auth``.
    """

    def upload(blob: PushBlob) -> bool:
        return upload_blob(client, blob.descriptor, blob.source.chunks, emit)

    sent = sum(_in_parallel(client, upload, source.blobs))
    descriptor = source.resolved.descriptor
    for name in (descriptor.id, *names):
        upload_manifest(client, source.resolved.data, descriptor.media_type, name)
    return sent


def prove_image(client: RegistryClient, source: PushSource, emit: Emit) -> None:
    """Pull the whole image back, every byte of it, and compare; nothing is kept.

    Raises:
        IntegrityError: ``blob.*``. TransportError: ``http.*``, ``auth``.
    """
    descriptor = source.resolved.descriptor
    data, _ = get_manifest(client, descriptor.id)
    if data != source.resolved.data:
        raise IntegrityError(
            "blob.digest", f"the registry's manifest {descriptor.digest} has other bytes", where=descriptor.digest,
            expected=descriptor.digest, actual=Digest.of(data),
        )  # fmt: skip

    def prove(blob: Descriptor) -> None:
        prove_blob(client, blob, emit)

    _in_parallel(client, prove, [blob.descriptor for blob in source.blobs])


def _in_parallel(client: RegistryClient, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """A few at a time; after the first error nothing new begins."""
    with ThreadPoolExecutor(max(1, client.options.parallel), "registry") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)
