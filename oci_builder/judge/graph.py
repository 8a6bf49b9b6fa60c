"""Documents and blobs: what a descriptor says against what is there."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, TypeVar

from oci_builder.judge.contents import Intake, Member
from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, Document, ImageConfig, Index, Manifest, validate
from oci_builder.model.errors import FormatError, IntegrityError, PolicyError, show
from oci_builder.model.jsontext import load_json

D = TypeVar("D", bound=Document)
# Documents of an image, and what is looked up once for an archive.
_BESIDE_LAYERS = 8
# Bytes of a document, and names of a layer, that cost as much as to look a blob up.
_DOCUMENT_BYTES, LAYER_NAMES = 4 << 10, 1 << 10


class Graph:
    """Looks blobs up, checks them, and remembers which members somebody refers to.

    Attributes:
        used: names of members that a document refers to.
        judged: names of members whose content has been judged.
        unread: whether there was a document that could not be read, and so what it refers to is not known.
    """

    __slots__ = ("_left", "contents", "findings", "intake", "judged", "options", "unread", "used")

    def __init__(self, intake: Intake) -> None:
        self.intake, self.contents = intake, intake.contents
        self.findings, self.options = intake.findings, intake.options
        self.used: set[str] = set()
        self.unread = False
        self.judged: set[str] = set()
        limits = self.options.limits
        self._left = limits.manifests * 2 * (limits.layers + _BESIDE_LAYERS)

    def spend(self, cost: int) -> None:
        """Count work: what an archive names many times costs it little, and us the work each time.

        Raises:
            PolicyError: ``limit.manifests``: more than an index full of images with most layers takes in two views.
        """
        self._left -= cost
        if self._left < 0:
            where, limits = self.findings.where, self.options.limits
            raise PolicyError(
                "limit.manifests", f"{where}: its documents name blobs more often than {limits.manifests} images with "
                f"{limits.layers} layers do", where=where,
            )  # fmt: skip

    def revisit(self, name: str, cost: int) -> None:
        """Count work on a member that has been judged before.

        Raises:
            PolicyError: as ``spend``.
        """
        self.spend(cost if name in self.judged else 0)
        self.judged.add(name)

    def member(self, name: str) -> Member | None:
        """The member of this name, marked as used.

        Raises:
            PolicyError: as ``spend``.
        """
        self.spend(1)
        self.used.add(name)
        self.used.add(self.contents.links.get(name, name))
        return self.contents.get(name)

    def blob(self, descriptor: Descriptor, where: str, *, needed: bool = True) -> Member | None:
        """The blob of a descriptor; what does not agree becomes findings. None when it is missing."""
        with self.findings.collecting():
            check_embedded(descriptor, where)
        if descriptor.urls:
            message = "its descriptor names places to fetch it from; we never do, but skopeo and podman prefer them"
            self.findings.warn("media.foreign", where, message, actual=show(descriptor.urls[0][:200]))
        member = self.member(descriptor.id.blob_path)
        if member is None:
            judge = self.findings.judge(needed)
            judge(
                "archive.missing",
                where,
                f"the blob {descriptor.digest} is not in the archive",
                expected=descriptor.digest,
            )
            return None
        if member.size != descriptor.size:
            self.findings.error(
                "blob.size", where, "the blob has another size", expected=descriptor.size, actual=member.size
            )
        if member.digest != descriptor.digest:
            self.findings.error(
                "blob.digest", where, "the blob has another digest", expected=descriptor.digest, actual=member.digest
            )
        return member

    def document(self, member: Member, where: str, *, most: int | None = None) -> Any:
        """The member as JSON.

        Raises:
            FormatError: ``json.*``.
            PolicyError: ``limit.document``.
        """
        place = f"{self.findings.where}: {where}"
        bound = self.options.limits.document
        bound = bound if most is None else min(most, bound)
        if member.size > bound:
            raise PolicyError(
                "limit.document", f"{place}: {member.size} bytes of JSON, the limit is {bound}", where=place,
                expected=f"<= {bound}", actual=member.size,
            )  # fmt: skip
        if member.data is None:
            packed = self.intake.layer_facts(member).compression
            what = f"{packed}-compressed bytes" if packed != "identity" else "no JSON"
            raise FormatError(
                "json.syntax", f"{place}: expected a JSON document, found {what}", where=place, actual=what
            )
        return load_json(member.data, place, self.options.limits, bound)

    def parse(self, model: type[D], member: Member, where: str) -> D | None:
        """The member as a document of a kind; None, with findings, when it is not one.

        Raises:
            PolicyError: as ``spend``.
        """
        self.revisit(member.name, member.size // _DOCUMENT_BYTES)
        with self.findings.collecting():
            value = self.document(member, where)
            place = f"{self.findings.where}: {where}"
            right_kind(model, value, place)
            return validate(model, value, place, self.options.limits)
        self.unread = True
        return None


def right_kind(model: type[Document], value: Any, where: str) -> None:
    """An index is no manifest and a manifest no index, whatever leads there; a config says what it is for.

    Raises:
        FormatError: ``media.mismatch``, ``config.platform``.
    """
    if not isinstance(value, dict):
        return
    index, manifest = "manifests" in value, "config" in value and "layers" in value
    if (model is Manifest and index and not manifest) or (model is Index and manifest and not index):
        expected, actual = ("a manifest", "an index") if model is Manifest else ("an index", "a manifest")
        raise FormatError(
            "media.mismatch", f"{where}: expected {expected}, found {actual}", where=where, expected=expected,
            actual=actual,
        )  # fmt: skip
    if model is ImageConfig and not (value.get("architecture") and value.get("os")):
        raise FormatError(
            "config.platform", f"{where}: a config must name architecture and os", where=where,
            expected="architecture and os", actual=show(f"{value.get('os')}/{value.get('architecture')}"),
        )  # fmt: skip


def check_embedded(descriptor: Descriptor, where: str) -> None:
    """The ``data`` field of a descriptor is the blob itself (descriptor.md, "Properties").

    Raises:
        FormatError: ``json.data``, not base64.
        IntegrityError: ``blob.size``, ``blob.digest``.
    """
    if descriptor.data is None:
        return
    place = f"{where}: data"
    try:
        data = base64.b64decode(descriptor.data, validate=True)
    except (binascii.Error, ValueError):
        raise FormatError("json.data", f"{place}: not base64", where=place) from None
    if len(data) != descriptor.size:
        raise IntegrityError(
            "blob.size", f"{place}: {len(data)} bytes embedded, the descriptor says {descriptor.size}", where=place,
            expected=descriptor.size, actual=len(data),
        )  # fmt: skip
    if Digest.of(data) != descriptor.digest:
        raise IntegrityError(
            "blob.digest", f"{place}: the embedded bytes have another digest", where=place,
            expected=descriptor.digest, actual=Digest.of(data),
        )  # fmt: skip


def is_attestation(descriptor: Descriptor) -> bool:
    """Build attestations stand in an index like images, but are none (containerd#8243, oc-mirror#1526)."""
    notes: Mapping[str, str] = descriptor.annotations or {}
    platform = descriptor.platform
    unknown = platform is not None and platform.os == platform.architecture == "unknown"
    return unknown or notes.get("vnd.docker.reference.type") == "attestation-manifest"


def is_artifact(manifest: Manifest, descriptor: Descriptor) -> bool:
    """Whether a manifest carries something else than an image: what refers to one, such as bills and signatures.

    Either it says so and has no image's config (manifest.md, "Guidelines for Artifact Usage"), or not one of its layers
    is of an image's family of media types (cosign's signatures have an image's config type).
    """
    said = manifest.subject or manifest.artifact_type or descriptor.artifact_type
    if said and manifest.config.media_type not in media.CONFIG_TYPES:
        return True
    return bool(manifest.layers) and not any(media.is_of_images(layer.media_type) for layer in manifest.layers)
