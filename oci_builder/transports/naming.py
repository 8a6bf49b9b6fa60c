"""The documents that name an image inside an archive."""

from __future__ import annotations

from dataclasses import dataclass

from oci_builder.model import media
from oci_builder.model.documents import Descriptor
from oci_builder.model.image import Image
from oci_builder.model.jsontext import dump_json

LAYOUT = dump_json({"imageLayoutVersion": "1.0.0"})


@dataclass(frozen=True, slots=True)
class Name:
    """How an image is called.

    Attributes:
        reference: ``name:tag``, as RepoTags has it.
        full: canonical reference with registry host; containerd and podman name the image wrongly without it.
    """

    reference: str
    full: str


def index_bytes(image: Image, name: Name, *, uncompressed: bool = False) -> bytes:
    """``index.json`` with the one image, annotated with its full name twice (image-layout.md; containerd importer)."""
    descriptor = image.manifest_descriptor(uncompressed=uncompressed).to_json()
    descriptor["platform"] = {"architecture": image.settings["architecture"], "os": image.settings["os"]}
    descriptor["annotations"] = {
        "io.containerd.image.name": name.full,
        "org.opencontainers.image.ref.name": name.full,
    }
    return dump_json({"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [descriptor]})


def docker_manifest_bytes(image: Image, name: Name, layers: list[Descriptor]) -> bytes:
    """``manifest.json`` as Docker reads it, over members of the same layout (moby image/tarexport)."""
    item = {
        "Config": image.config_descriptor.id.blob_path,
        "RepoTags": [name.reference],
        "Layers": [layer.id.blob_path for layer in layers],
    }
    return dump_json([item])


def unique(layers: list[Descriptor]) -> list[Descriptor]:
    """Each blob once, in order: a layer used twice is stored once (bazel-contrib/rules_oci#256)."""
    return list({layer.digest: layer for layer in layers}.values())
