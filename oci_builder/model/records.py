"""``container.json`` and ``portable.json``: what a build made, as plain JSON values that other programs rely on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oci_builder.model.image import Image, Layer
from oci_builder.model.spec import Spec

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A finished file: name, ``sha256:`` digest, size in bytes."""

    name: str
    sha256: str
    size: int

    def to_json(self) -> dict[str, Any]:
        """As JSON keys; ``sha256`` without its prefix, as sha256sum prints it."""
        return {"file": self.name, "sha256": self.sha256.removeprefix("sha256:"), "size": self.size}


@dataclass(frozen=True, slots=True)
class Tools:
    """What the bytes depend on beside the inputs: compressor and libraries, our version."""

    version: str
    compression: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As JSON keys."""
        return {"oci-builder": self.version, "compression": dict(self.compression)}


def layer_json(layer: Layer, base: bool) -> dict[str, Any]:
    """One layer."""
    return {
        "name": layer.name or ("base image" if base else ""),
        "from": "base" if base else "build",
        "media_type": layer.descriptor.media_type,
        "compression": layer.compression,
        "digest": layer.descriptor.digest,
        "size": layer.descriptor.size,
        "diff_id": layer.diff_id,
        "tar_size": layer.tar_size,
    }


def container_record(
    spec: Spec, image: Image, base: Mapping[str, Any], oci: FileRecord, docker: FileRecord, tools: Tools
) -> dict[str, Any]:
    """``container.json``.

    ``image_ids`` foretells what engines call the image: the classic store and podman the config digest, the containerd
    store the manifest digest of the archive that it was loaded from. ``layers`` of an archive says how its layers stand
    in it: what a client stores and pushes (NixOS/nix#15252).
    """
    config, manifest = image.config_descriptor, image.manifest_descriptor()
    plain = image.manifest_descriptor(uncompressed=True)
    return {
        "schema": SCHEMA,
        "name": spec.name,
        "tag": spec.tag,
        "reference": spec.reference,
        "full_reference": spec.full_reference,
        "release": spec.release,
        "platform": spec.platform,
        "prefix": spec.prefix,
        "epoch": spec.epoch,
        "config": {"digest": config.digest, "size": config.size},
        "manifest": {"digest": manifest.digest, "size": manifest.size},
        "docker_manifest": {"digest": plain.digest, "size": plain.size},
        "image_ids": {"classic": config.digest, "containerd": {oci.name: manifest.digest, docker.name: plain.digest}},
        "base": dict(base),
        "layers": [layer_json(layer, index < image.base_layers) for index, layer in enumerate(image.layers)],
        "diff_ids": [layer.diff_id for layer in image.layers],
        "size": {
            "compressed": sum(layer.descriptor.size for layer in image.layers),
            "uncompressed": sum(layer.tar_size for layer in image.layers),
        },
        "archives": {
            oci.name: {**oci.to_json(), "layers": sorted({layer.compression for layer in image.layers})},
            docker.name: {**docker.to_json(), "layers": ["identity"]},
        },
        "tools": tools.to_json(),
    }


def portable_record(
    spec: Spec, place: bytes, portable: FileRecord, layers: Sequence[Layer], counts: Mapping[str, int], tools: Tools
) -> dict[str, Any]:
    """``portable.json``. ``files`` counts regular files and hard links, ``entries`` everything.

    Args:
        place: where the runtime lies in the archive: the prefix, or where links of the base lead it.
    """
    return {
        "schema": SCHEMA,
        "name": spec.name,
        "tag": spec.tag,
        "release": spec.release,
        **portable.to_json(),
        "prefix": place.decode("utf-8", "backslashreplace"),
        "files": counts["files"],
        "entries": counts["entries"],
        "content_size": counts["content_size"],
        "tar_size": counts["tar_size"],
        "tiers": sorted(spec.tiers),
        "diff_ids": [layer.diff_id for layer in layers],
        "tools": tools.to_json(),
    }
