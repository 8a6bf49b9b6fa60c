"""Evidence beside an image: artifact manifests that name it as their subject, listed by the registry or a fallback tag.

Source: OCI distribution-spec 1.1, "Listing Referrers", "Pushing Manifests with Subject" and the referrers tag schema;
image-spec manifest.md, "Guidelines for Artifact Usage".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urljoin

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, Index, Manifest, parse_document
from oci_builder.model.errors import FormatError, IntegrityError, PolicyError
from oci_builder.model.events import Emit, silent
from oci_builder.model.jsontext import dump_json, load_json
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_manifests import ACCEPT, get_manifest
from oci_builder.transports.registry_push import upload_blob, upload_manifest

TITLE = "org.opencontainers.image.title"
_EMPTY = b"{}"
_TRIES = 5
# Of the listing: many more than anybody attaches.
_PAGES = 100
# RFC 8288; a registry's next page is the only relation that it gives.
_NEXT = re.compile(r"<(?P<url>[^>]*)>\s*;[^,]*\brel=\"?next\b")


class ArtifactLike(Protocol):
    """What is pushed: files by name, all of one media type."""

    @property
    def artifact_type(self) -> str: ...
    @property
    def media_type(self) -> str: ...
    @property
    def files(self) -> Mapping[str, bytes]: ...
    @property
    def annotations(self) -> Mapping[str, str]: ...


class ArtifactRegistry:
    """Artifacts of one repository.

    Args:
        client: with the actions ``pull,push`` where something is to be pushed.
        most: bytes of the largest file that ``pull_artifact`` takes.
    """

    def __init__(self, client: RegistryClient, emit: Emit = silent, most: int = 64 << 20) -> None:
        self._client, self._emit, self._most = client, emit, most

    def push_artifact(self, subject: Descriptor, artifact: ArtifactLike) -> Digest:
        """Push an artifact that refers to ``subject``; gives its manifest's digest. Idempotent: same files, same one.

        Where the registry has no referrers API, its fallback tag's index is kept.

        Raises:
            IntegrityError: ``blob.digest``, ``registry.referrer``.
            TransportError: ``http.*``, ``auth``.
        """
        empty = Descriptor(media_type=media.OCI_EMPTY, digest=Digest.of(_EMPTY), size=len(_EMPTY))
        upload_blob(self._client, empty, lambda: iter((_EMPTY,)), self._emit)
        layers = [self._push_file(name, data, artifact.media_type) for name, data in sorted(artifact.files.items())]
        value: dict[str, Any] = {
            "schemaVersion": 2, "mediaType": media.OCI_MANIFEST, "artifactType": artifact.artifact_type,
            "config": empty.to_json(), "layers": layers or [empty.to_json()],
            "subject": {"mediaType": subject.media_type, "digest": subject.digest, "size": subject.size},
        }  # fmt: skip
        if artifact.annotations:
            value["annotations"] = dict(artifact.annotations)
        data = dump_json(value)
        digest = Digest.of(data)
        answer = upload_manifest(self._client, data, media.OCI_MANIFEST, digest)
        if answer.headers.get("OCI-Subject") != subject.digest:
            entry = {"mediaType": media.OCI_MANIFEST, "digest": digest, "size": len(data)}
            entry["artifactType"] = artifact.artifact_type
            if artifact.annotations:
                entry["annotations"] = dict(artifact.annotations)
            self._add_to_tag(subject.id, Descriptor.model_validate(entry))
        return digest

    def referrers(self, subject: Digest) -> Sequence[Descriptor]:
        """Manifests that refer to ``subject``.

        Raises:
            FormatError: ``json.*``, ``media.*``. TransportError: ``http.*``, ``auth``. PolicyError: ``limit.document``:
                pages without end.
        """
        found: list[Descriptor] = []
        place = f"referrers/{subject}"
        for _ in range(_PAGES):
            response = self._client.open("GET", place, {"Accept": media.OCI_INDEX})
            # An old registry knows no such path, and says so in one of these ways.
            with self._client.expect(response, *((200,) if found else (200, 400, 404, 405))) as answer:
                if answer.status != 200:
                    return self._index(self._tagged(subject), subject).manifests
                found += self._index(answer.read(self._client.options.limits.document), subject).manifests
                following = _NEXT.search(answer.headers.get("Link") or "")
                if following is None:
                    return found
                place = urljoin(answer.url or self._client.url(""), following["url"])
        raise PolicyError("limit.document", f"referrers of {subject}: more than {_PAGES} pages", where=subject)

    def pull_artifact(self, digest: Digest) -> Mapping[str, bytes]:
        """An artifact's files by their title, each verified.

        Raises:
            IntegrityError: ``blob.digest``, ``blob.size``. FormatError: ``json.*``, ``media.*``.
            PolicyError: ``limit.document`` for a file over the bound. TransportError: ``http.*``, ``auth``.
        """
        data, _ = get_manifest(self._client, digest)
        if Digest.of(data) != digest:
            raise IntegrityError(
                "blob.digest", f"{digest}: the registry's manifest hashes to {Digest.of(data)}", where=digest,
                expected=digest, actual=Digest.of(data),
            )  # fmt: skip
        manifest = parse_document(Manifest, data, digest, self._client.options.limits)
        files: dict[str, bytes] = {}
        for layer in manifest.layers:
            name = (layer.annotations or {}).get(TITLE)
            if name is None:
                continue
            if name in files:
                raise FormatError("json.ambiguous", f"{digest}: two files of the same title", where=digest)
            files[name] = self._file(layer)
        return files

    def _push_file(self, name: str, data: bytes, media_type: str) -> dict[str, Any]:
        found = Descriptor(
            media_type=media_type, digest=Digest.of(data), size=len(data), annotations={TITLE: name}
        )  # fmt: skip
        upload_blob(self._client, found, lambda: iter((data,)), self._emit)
        return found.to_json()

    def _file(self, layer: Descriptor) -> bytes:
        if layer.size > self._most:
            raise PolicyError(
                "limit.document", f"{layer.digest}: {layer.size} bytes, the limit is {self._most}", where=layer.digest
            )
        with self._client.expect(self._client.open("GET", f"blobs/{layer.digest}"), 200) as response:
            data = response.read(layer.size)
        if len(data) != layer.size or Digest.of(data) != layer.id:
            code = "blob.digest" if len(data) == layer.size else "blob.size"
            raise IntegrityError(
                code, f"{layer.digest}: other bytes came", where=layer.digest, expected=layer.digest,
                actual=Digest.of(data),
            )  # fmt: skip
        return data

    def _add_to_tag(self, subject: Digest, entry: Descriptor) -> None:
        """Read, add, write, read again: another writer may have been between, so until ours stays."""
        for _ in range(_TRIES):
            data = self._tagged(subject)
            if self._lists(data, subject, entry):
                return
            # Whatever others put there stays as they wrote it, keys that we do not know included.
            index = load_json(data, f"referrers of {subject}", self._client.options.limits)
            index["manifests"].append(entry.to_json())
            with suppress(IntegrityError):  # somebody wrote it in the same moment
                upload_manifest(self._client, dump_json(index), media.OCI_INDEX, _tag(subject))
        if not self._lists(self._tagged(subject), subject, entry):
            raise IntegrityError(
                "registry.referrer", f"{entry.digest} does not stay in the index {_tag(subject)}", where=subject,
                expected=entry.digest,
            )  # fmt: skip

    def _tagged(self, subject: Digest) -> bytes:
        """The fallback tag's index as it is, or an empty one."""
        response = self._client.open("GET", f"manifests/{_tag(subject)}", {"Accept": ACCEPT})
        with self._client.expect(response, 200, 404) as answer:
            if answer.status == 404:
                return dump_json({"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": []})
            return answer.read(self._client.options.limits.document)

    def _lists(self, data: bytes, subject: Digest, entry: Descriptor) -> bool:
        return any(d.digest == entry.digest for d in self._index(data, subject).manifests)

    def _index(self, data: bytes, subject: Digest) -> Index:
        return parse_document(Index, data, f"referrers of {subject}", self._client.options.limits)


def _tag(subject: Digest) -> str:
    return f"sha256-{subject.hex}"


__all__ = ["TITLE", "ArtifactLike", "ArtifactRegistry"]
