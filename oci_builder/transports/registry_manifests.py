"""Manifests of a registry by digest: hashed, typed by what they are, and kept in the store.

Source: OCI distribution-spec, "Pulling manifests". The digest header of an answer is never used: the body is hashed.
"""

from __future__ import annotations

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import FormatError, IntegrityError, PolicyError, show
from oci_builder.model.jsontext import load_json
from oci_builder.store.blobs import DirStore
from oci_builder.transports.registry import RegistryClient

ACCEPT = ", ".join((media.OCI_INDEX, media.OCI_MANIFEST, media.DOCKER_LIST, media.DOCKER_MANIFEST))
_KNOWN = media.INDEX_TYPES | media.MANIFEST_TYPES
_SCHEMA1 = frozenset({media.DOCKER_SCHEMA1, media.DOCKER_SCHEMA1_SIGNED})


def fetch_manifest(client: RegistryClient, digest: Digest, store: DirStore, size: int | None = None) -> bytes:
    """An index or manifest, from the store where it is there: then no request is made (B080).

    Args:
        size: bytes that its descriptor states, where there is one.

    Raises:
        IntegrityError: ``blob.digest``, ``blob.size``.
        FormatError: ``media.schema1``, ``media.mismatch``.
        TransportError: ``http.*``, ``auth``.
        PolicyError: ``limit.document``, ``http.redirect``.
    """
    limit = client.options.limits.document
    if size is not None and size > limit:
        raise PolicyError("limit.document", f"{digest}: {size} bytes of JSON, the limit is {limit}", where=digest)
    if store.has(digest):
        data = store.read(digest, limit)
        _check_size(data, digest, size)
        return data
    data, content_type = get_manifest(client, digest)
    if content_type in _SCHEMA1:
        raise FormatError(
            "media.schema1", f"{digest}: the registry answers with Docker manifest schema 1, which is not supported;"
            " push the image anew with a current client", where=digest, actual=content_type,
        )  # fmt: skip
    _check_size(data, digest, size)
    actual = Digest.of(data)
    if actual != digest:
        raise IntegrityError(
            "blob.digest", f"the registry's manifest {digest} hashes to {actual}", where=digest, expected=digest,
            actual=actual,
        )  # fmt: skip
    described = describe(data, digest)
    if content_type in _KNOWN and content_type != described.media_type:
        raise FormatError(
            "media.mismatch", f"{digest}: served as {content_type}, but it is {described.media_type}", where=digest,
            expected=described.media_type, actual=content_type,
        )  # fmt: skip
    store.put(data)
    return data


def _check_size(data: bytes, digest: Digest, size: int | None) -> None:
    if size is not None and len(data) != size:
        raise IntegrityError(
            "blob.size", f"{digest}: {len(data)} bytes, the index says {size}", where=digest, expected=size,
            actual=len(data),
        )  # fmt: skip


def get_manifest(client: RegistryClient, name: str) -> tuple[bytes, str]:
    """Body and content type of a manifest by digest or tag, neither judged.

    Raises:
        PolicyError: ``limit.document``.
        TransportError: ``http.*``, ``auth``.
    """
    limit = client.options.limits.document
    with client.expect(client.open("GET", f"manifests/{name}", {"Accept": ACCEPT}), 200) as response:
        data = response.read(limit)
        content_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if len(data) > limit:
        raise PolicyError("limit.document", f"{name}: a manifest larger than {limit} bytes", where=name)
    return data, content_type


def describe(data: bytes, digest: Digest) -> Descriptor:
    """The descriptor of a document that was found by its digest alone: its type is what it says, else what it holds.

    Raises:
        FormatError: ``json.*``, ``media.mismatch``.
    """
    value = load_json(data, digest)
    if not isinstance(value, dict):
        raise FormatError("json.field", f"{digest}: expected a JSON object, got {type(value).__name__}", where=digest)
    kind = value.get("mediaType")
    if kind is None:
        kind = media.OCI_INDEX if "manifests" in value else media.OCI_MANIFEST
    if value.get("schemaVersion") == 1 or kind in _SCHEMA1:
        raise FormatError("media.schema1", f"{digest}: Docker manifest schema 1 is not supported", where=digest)
    if kind not in _KNOWN:
        raise FormatError(
            "media.mismatch", f"{digest}: {show(str(kind)[:200])} is neither an image nor an index", where=digest,
            actual=str(kind)[:200],
        )  # fmt: skip
    return Descriptor(media_type=kind, digest=digest, size=len(data))
