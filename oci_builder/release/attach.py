"""Evidence beside an image in a registry: SBOMs, provenance and receipts as referrers of its manifest.

Source: OCI distribution-spec 1.1, "Listing Referrers" and its fallback tag scheme, which the transport handles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import IntegrityError
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.release.files import read_file
from oci_builder.release.folder import QUALIFICATION, ReleaseFolder

SBOM_TYPE = "application/vnd.cyclonedx+json"
RECEIPT_ARTIFACT = "application/vnd.oci-builder.receipt.v1"
PROVENANCE_ARTIFACT = "application/vnd.oci-builder.provenance.v1"
QUALIFICATION_ARTIFACT = "application/vnd.oci-builder.qualification.v1+json"
DSSE = "application/vnd.dsse.envelope.v1+json"


@dataclass(frozen=True, slots=True)
class Artifact:
    """One referrer: its type, and its files by name."""

    artifact_type: str
    media_type: str
    files: Mapping[str, bytes]
    annotations: Mapping[str, str] = field(default_factory=dict)


class Registry(Protocol):
    """What attaching needs of a registry."""

    def push_artifact(self, subject: Descriptor, artifact: Artifact) -> Digest:
        """Push blobs and a manifest with ``subject``; keep the fallback tag where there is no referrers API."""

    def referrers(self, subject: Digest) -> Sequence[Descriptor]:
        """Manifests that refer to ``subject``, by the API or the fallback tag."""

    def pull_artifact(self, digest: Digest) -> Mapping[str, bytes]:
        """Files of an artifact by name (its layers' title annotation), digests verified."""


def artifacts(folder: ReleaseFolder) -> tuple[Artifact, ...]:
    """What a release folder has to attach: SBOMs, provenance, receipts, the qualification. One referrer a file.

    Raises:
        TransportError: ``io.*``.
    """
    found = [_one(path.name, folder, SBOM_TYPE, SBOM_TYPE) for path in sorted(folder.root.glob("*.cdx.json"))]
    found += [_one(p.name, folder, PROVENANCE_ARTIFACT, DSSE) for p in sorted(folder.root.glob("provenance*.json"))]
    found += [artifact_of(RECEIPT_ARTIFACT, DSSE, name, data) for name, data in folder.envelopes().items()]
    if (folder.root / QUALIFICATION).is_file():
        found.append(_one(QUALIFICATION, folder, QUALIFICATION_ARTIFACT, "application/json"))
    return tuple(found)


def _one(name: str, folder: ReleaseFolder, kind: str, media_type: str) -> Artifact:
    # An SBOM of a large environment is larger than the bound for image documents.
    return artifact_of(kind, media_type, name, read_file(folder.root / name, 16 * DEFAULT_LIMITS.document))


def artifact_of(kind: str, media_type: str, name: str, data: bytes) -> Artifact:
    """One file as an artifact; the listing of referrers shows its name, for several have the same type."""
    return Artifact(kind, media_type, {name: data}, {"org.opencontainers.image.title": name})


def attach(
    registry: Registry, subject: Descriptor, what: Sequence[Artifact], emit: Emit = silent
) -> tuple[Digest, ...]:
    """Attach every artifact to the image and read each back. Idempotent: the same artifact has the same digest.

    Args:
        subject: descriptor of the image's manifest as the registry has it.

    Raises:
        IntegrityError: ``blob.digest``: other bytes came back; ``registry.referrer``: it is not listed.
        TransportError: ``http.*``, ``auth``.
    """
    pushed = []
    for artifact in what:
        digest = registry.push_artifact(subject, artifact)
        emit(Event("note", "attach", message=f"{', '.join(artifact.files)}: {digest}"))
        _compare(artifact.files, registry.pull_artifact(digest), digest)
        pushed.append(digest)
    listed = {d.digest for d in registry.referrers(subject.id)}
    missing = [d for d in pushed if d not in listed]
    if missing:
        raise IntegrityError(
            "registry.referrer", f"{missing[0]} is not listed as a referrer of {subject.digest}",
            expected=missing[0], where=subject.digest,
        )  # fmt: skip
    return tuple(pushed)


def _compare(sent: Mapping[str, bytes], got: Mapping[str, bytes], digest: Digest) -> None:
    for name, data in sent.items():
        back = got.get(name)
        if back != data:
            actual = "nothing" if back is None else hashlib.sha256(back).hexdigest()
            raise IntegrityError(
                "blob.digest", f"{digest}: other bytes of {name} came back", where=name,
                expected=hashlib.sha256(data).hexdigest(), actual=actual,
            )  # fmt: skip


__all__ = ["DSSE", "Artifact", "Registry", "artifact_of", "artifacts", "attach"]
