"""Media types of OCI and Docker documents and layers (image-spec media-types.md, distribution manifest-v2-2.md)."""

from __future__ import annotations

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
OCI_LAYER_GZIP = OCI_LAYER + "+gzip"
OCI_LAYER_ZSTD = OCI_LAYER + "+zstd"
OCI_EMPTY = "application/vnd.oci.empty.v1+json"

DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_SCHEMA1 = "application/vnd.docker.distribution.manifest.v1+json"
DOCKER_SCHEMA1_SIGNED = "application/vnd.docker.distribution.manifest.v1+prettyjws"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
DOCKER_LAYER_GZIP = DOCKER_LAYER + ".gzip"
DOCKER_LAYER_ZSTD = DOCKER_LAYER + ".zstd"
DOCKER_FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
OCI_NONDISTRIBUTABLE = "application/vnd.oci.image.layer.nondistributable.v1.tar"

INDEX_TYPES = frozenset({OCI_INDEX, DOCKER_LIST})
MANIFEST_TYPES = frozenset({OCI_MANIFEST, DOCKER_MANIFEST})
CONFIG_TYPES = frozenset({OCI_CONFIG, DOCKER_CONFIG})

# Compression names as used all over the project: "identity", "gzip", "zstd".
LAYER_COMPRESSION: dict[str, str] = {
    OCI_LAYER: "identity",
    OCI_LAYER_GZIP: "gzip",
    OCI_LAYER_ZSTD: "zstd",
    DOCKER_LAYER: "identity",
    DOCKER_LAYER_GZIP: "gzip",
    DOCKER_LAYER_ZSTD: "zstd",
}

# Layers that are fetched from elsewhere by URL: refused, never fetched (SSRF).
FOREIGN_LAYERS = frozenset(
    {DOCKER_FOREIGN, OCI_NONDISTRIBUTABLE, OCI_NONDISTRIBUTABLE + "+gzip", OCI_NONDISTRIBUTABLE + "+zstd"}
)


def oci_layer(compression: str) -> str:
    """The OCI layer media type for a compression name."""
    return {"identity": OCI_LAYER, "gzip": OCI_LAYER_GZIP, "zstd": OCI_LAYER_ZSTD}[compression]


def is_of_images(media_type: str) -> bool:
    """Whether a media type is one of images' families, known to us or not."""
    return media_type.startswith(("application/vnd.oci.image.", "application/vnd.docker."))
