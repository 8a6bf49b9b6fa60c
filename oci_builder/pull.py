"""``oci-builder pull``: an image from a registry, by digest, into an OCI layout folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, Platform
from oci_builder.model.events import Emit, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_layout import LayoutFolder
from oci_builder.transports.registry_policy import RegistryOptions
from oci_builder.transports.registry_pull import Fetched, fetch_image
from oci_builder.transports.registry_reference import pinned_reference


@dataclass(frozen=True, slots=True)
class PullOptions:
    """How to pull.

    Attributes:
        platform: ``os/architecture[/variant]``, taken from an index.
        plain_http: speak HTTP to a registry that is not on loopback.
        prove: also decompress each layer and compare its tar with the config's diff_id. Every byte is what the pinned
            digest says either way; this costs more than the pull itself where the registry is near.
    """

    platform: str = "linux/amd64"
    plain_http: bool = False
    prove: bool = False
    limits: Limits = DEFAULT_LIMITS


@dataclass(frozen=True, slots=True)
class Pulled:
    """What is in the layout now: digests of what was asked for, the platform's manifest and the config; its layers."""

    name: str
    root: Digest
    manifest: Digest
    config: Digest
    layers: tuple[Descriptor, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        layers = [{"digest": d.digest, "size": d.size, "mediaType": d.media_type} for d in self.layers]
        return {
            "name": self.name, "digest": self.root, "manifest": self.manifest, "config": self.config, "layers": layers,
        }  # fmt: skip


def pull(reference: str, dest: Path, options: PullOptions | None = None, emit: Emit = silent) -> Pulled:
    """Pull ``reference`` (with a digest) into the OCI layout ``dest``, which is made, or added to.

    A layout holds one image a platform: the image that a name stood for gives way to the new one of that name, another
    name may be given to the same image, and an image beside another one is refused before anything is fetched.

    Index, manifest, config and layers are the registry's bytes; ``index.json`` names the platform's manifest under the
    reference's name, and is written last. Idempotent. After a failure or a kill, the next run continues.

    Raises:
        SpecError: ``spec.reference``, ``spec.digest``, ``spec.credentials``.
        ConflictError: ``pull.not_layout``, ``pull.other_image``.
        FormatError, IntegrityError, PolicyError, TransportError: as ``fetch_image``.
    """
    options = options or PullOptions()
    pinned = pinned_reference(reference)
    http = RegistryOptions(plain_http=options.plain_http, limits=options.limits)
    name = pinned.name if pinned.tag else pinned.canonical
    with LayoutFolder(dest) as layout, RegistryClient(pinned, http, emit=emit) as client:
        if pinned.digest is not None:
            layout.check_room(pinned.digest, _platform(options.platform), name)
        fetched = fetch_image(client, layout.store, options.platform, emit=emit, prove=options.prove)
        layout.name(_entry(fetched, options.platform), name)
    manifest = fetched.resolved.manifest
    return Pulled(name, fetched.root.id, fetched.resolved.descriptor.id, manifest.config.id, manifest.layers)


def _platform(text: str) -> Platform:
    system, _, rest = text.partition("/")
    return Platform(os=system, architecture=rest.partition("/")[0])


def _entry(fetched: Fetched, platform: str) -> Descriptor:
    """The manifest's descriptor with its platform, as the index had it or as the config says."""
    descriptor = fetched.resolved.descriptor
    known = descriptor.platform or _platform(platform)
    return Descriptor(
        media_type=descriptor.media_type, digest=descriptor.digest, size=descriptor.size, platform=known,
        annotations=descriptor.annotations,
    )  # fmt: skip


__all__ = ["PullOptions", "Pulled", "pull"]
