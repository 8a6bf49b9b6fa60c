"""``oci-builder publish --to-registry``: the image, and its evidence as referrers, pulled back and signed for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import IntegrityError, SpecError, TransportError
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.receipts import OCI, Check
from oci_builder.release.attach import DSSE, RECEIPT_ARTIFACT, Artifact, artifact_of, artifacts, attach
from oci_builder.release.delivery import Publication, delivery_receipt, keep, refuse_secrets, require_trusted
from oci_builder.release.files import require_writable
from oci_builder.release.folder import QUALIFICATION
from oci_builder.release.host import stamp, utc_now
from oci_builder.release.parts import hash_parts, plan_parts
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_artifacts import ArtifactRegistry
from oci_builder.transports.registry_image import prove_image, push_image
from oci_builder.transports.registry_manifests import get_manifest
from oci_builder.transports.registry_policy import RegistryOptions
from oci_builder.transports.registry_reference import parse_reference
from oci_builder.transports.registry_source import PushSource


@dataclass(frozen=True, slots=True)
class RegistryDelivery:
    """Where it is now: the name by digest, the referrers, and the signed receipt (one of them)."""

    reference: str
    manifest: Digest
    referrers: tuple[Digest, ...]
    receipt: Path

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "reference": self.reference, "manifest": self.manifest, "referrers": list(self.referrers),
            "receipt": str(self.receipt),
        }  # fmt: skip


def publish_registry(
    what: Publication, reference: str, options: RegistryOptions | None = None, emit: Emit = silent
) -> RegistryDelivery:
    """Push the image, attach SBOMs, provenance and receipts, pull all of it back; then the delivery receipt.

    The receipt names the manifest beside the archives: it is the signature over the image. It and the verdict are
    attached last. A run that was interrupted is repeated as it is: what the registry has is not sent again.

    Raises:
        SpecError: ``spec.reference``, ``publish.archive``; ``spec.digest``: the reference names another image.
        IntegrityError: ``blob.*``: an archive is not the recorded one, or other bytes came back;
            ``registry.referrer``: an artifact is not listed.
        PolicyError: ``policy.secret``, ``policy.weights``, ``release.link``, ``key.trust``: nothing was sent.
        CheckFailed: ``release.rewritten``, ``release.unproven``: nor then.
        TransportError: ``http.*``, ``auth``, ``io.*``. ConflictError: ``release.exists``.
    """
    started = stamp()
    target = parse_reference(reference)
    _require_ready(what, emit)
    subjects, manifest = _recorded(what)
    if target.digest not in (None, manifest):
        raise SpecError("spec.digest", f"the release's image is {manifest}, not {target.digest}", where=reference)
    evidence = [a for a in artifacts(what.folder) if QUALIFICATION not in a.files]
    checks = [refuse_secrets(what, [OCI], _files(what, evidence), emit)]
    with PushSource(what.archive(OCI)) as source:
        subject = source.resolved.descriptor
        _require_recorded(subject, manifest)
        with RegistryClient(target, options or RegistryOptions(), "pull,push", emit) as client:
            _push(client, source, target.tag, manifest, emit)
            registry = ArtifactRegistry(client, emit)
            pushed = attach(registry, _plain(subject), evidence, emit)
            checks += [Check(name=name, outcome="pass") for name in ("pushed", "pulled-back", "referrers")]
            referrers = {name: digest for a, digest in zip(evidence, pushed, strict=True) for name in a.files}
            details = {"reference": target.name, "manifest": manifest, "referrers": referrers}
            name, envelope = delivery_receipt(what, {**subjects, target.name: manifest.hex}, checks, details, started)
            receipt = keep(what, name, envelope, utc_now())
            last = [artifact_of(RECEIPT_ARTIFACT, DSSE, name, envelope)]
            last += [a for a in artifacts(what.folder) if QUALIFICATION in a.files]
            pushed += attach(registry, _plain(subject), last, emit)
    return RegistryDelivery(f"{target.name}@{manifest}", manifest, pushed, receipt)


def _require_ready(what: Publication, emit: Emit) -> None:
    what.folder.require_own_files()
    require_writable(what.folder.receipts)
    require_trusted(what, utc_now(), emit)


def _require_recorded(subject: Descriptor, manifest: Digest) -> None:
    if subject.id != manifest:
        raise IntegrityError(
            "blob.digest", f"{OCI} holds {subject.digest}, container.json names {manifest}", where=OCI,
            expected=manifest, actual=subject.digest,
        )  # fmt: skip


def _push(client: RegistryClient, source: PushSource, tag: str | None, manifest: Digest, emit: Emit) -> None:
    """Push the image and pull it back; say so when its tag named another one."""
    before = _named(client, tag)
    push_image(client, source, (tag,) if tag else (), emit)
    prove_image(client, source, emit)
    if before not in (None, manifest):
        emit(Event("warning", "publish", message=f"{tag} named {before} before, and now this image"))


def _named(client: RegistryClient, tag: str | None) -> Digest | None:
    """What a tag names; None where it names nothing, or does not say."""
    if not tag:
        return None
    try:
        return Digest.of(get_manifest(client, tag)[0])
    except TransportError:
        return None


def _recorded(what: Publication) -> tuple[dict[str, str], Digest]:
    """(archive -> sha256, the image's manifest), once the OCI archive was found to be the recorded one."""
    subjects = what.folder.subjects()
    container = what.folder.document("container.json")
    value = container.get("manifest") if isinstance(container, dict) else None
    digest = value.get("digest") if isinstance(value, dict) else None
    if OCI not in subjects or not isinstance(digest, str):
        raise SpecError("publish.archive", f"container.json names no {OCI} with its manifest", where=OCI)
    hash_parts(plan_parts(OCI, what.archive(OCI), max_file=1 << 62), subjects[OCI])
    return subjects, Digest.parse(digest, "container.json: manifest")


def _files(what: Publication, evidence: Sequence[Artifact]) -> list[Path]:
    root, receipts = what.folder.root, what.folder.receipts
    names = [name for artifact in evidence for name in artifact.files]
    return [*(root / name if (root / name).is_file() else receipts / name for name in names), what.helper]


def _plain(subject: Descriptor) -> Descriptor:
    return Descriptor(media_type=subject.media_type, digest=subject.digest, size=subject.size)


__all__ = ["Publication", "RegistryDelivery", "publish_registry"]
