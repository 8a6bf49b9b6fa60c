"""``oci-builder push``: the image of an OCI archive or layout into a registry, read back afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.errors import SpecError
from oci_builder.model.events import Emit, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_image import push_image
from oci_builder.transports.registry_policy import RegistryOptions
from oci_builder.transports.registry_reference import parse_reference
from oci_builder.transports.registry_source import PushSource


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How to push.

    Attributes:
        platform: which image of an index.
        image: name or digest of the one that is meant, where there are several.
        plain_http: speak HTTP to a registry that is not on loopback.
        parallel: blobs at a time.
    """

    platform: str = "linux/amd64"
    plain_http: bool = False
    limits: Limits = DEFAULT_LIMITS
    parallel: int = 3
    image: str = ""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What the registry has now.

    Attributes:
        name: the reference, without digest.
        manifest: its digest; a reference to keep is ``name@manifest``.
        uploaded: blobs that were sent; the others were there.
    """

    name: str
    manifest: Digest
    media_type: str
    size: int
    uploaded: int

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "name": self.name, "manifest": self.manifest, "mediaType": self.media_type, "size": self.size,
            "uploaded": self.uploaded,
        }  # fmt: skip


def push(archive: Path, reference: str, options: PushOptions | None = None, emit: Emit = silent) -> Pushed:
    """Push one platform's image: blobs, then the manifest by digest, then by tag; each is asked for again.

    Success means that the registry gives the manifest's exact bytes back and has every blob in its size. Idempotent:
    what is there is not sent again.

    Raises:
        SpecError: ``spec.reference``, ``spec.path``, ``spec.archive`` (a compressed archive), ``spec.digest`` (the
            reference's digest is another image's).
        FormatError, IntegrityError, PolicyError: what is wrong with the archive; nothing is named then.
        TransportError: ``http.*``, ``auth``, ``io.*``.
    """
    options = options or PushOptions()
    target = parse_reference(reference)
    with PushSource(archive, options.platform, options.limits, options.image) as source:
        descriptor = source.resolved.descriptor
        if target.digest not in (None, descriptor.id):
            raise SpecError(
                "spec.digest", f"{archive.name} holds {descriptor.digest}, the reference says {target.digest}",
                where=reference, expected=target.digest, actual=descriptor.digest,
            )  # fmt: skip
        http = RegistryOptions(
            plain_http=options.plain_http, limits=options.limits, parallel=options.parallel,
            mount_from=source.base_repository(target),
        )  # fmt: skip
        with RegistryClient(target, http, "pull,push", emit) as client:
            sent = push_image(client, source, (target.tag,) if target.tag else (), emit)
    return Pushed(target.name, descriptor.id, descriptor.media_type, descriptor.size, sent)


__all__ = ["PushOptions", "Pushed", "push"]
