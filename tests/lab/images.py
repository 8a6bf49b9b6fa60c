"""Small valid images as registry content: made from tar bytes, so that every digest below is real."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from dataclasses import dataclass
from typing import Any

from oci_builder.model import media
from oci_builder.model.digest import Digest
from tests.lab.registry import Registry


@dataclass(frozen=True)
class SmallImage:
    """An image's documents and layer blobs."""

    manifest: bytes
    config: bytes
    layers: tuple[bytes, ...]
    media_type: str = media.OCI_MANIFEST

    @property
    def digest(self) -> Digest:
        """The manifest's digest."""
        return Digest.of(self.manifest)

    def descriptor(self, **more: Any) -> dict[str, Any]:
        """As an index names it."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.manifest), **more}

    def publish(self, registry: Registry, repo: str, *tags: str) -> Digest:
        """Put everything into a registry."""
        for blob in (self.config, *self.layers):
            registry.put_blob(blob)
        return registry.put_manifest(repo, self.manifest, self.media_type, *tags)


def layer_tar(name: str, content: bytes) -> bytes:
    """A tar of one file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def small_image(
    layers: int = 1, size: int = 1000, arch: str = "amd64", docker: bool = False, seed: int = 0, **changes: Any
) -> SmallImage:
    """An image of ``layers`` layers of about ``size`` incompressible bytes.

    Args:
        changes: keys of the manifest to replace, by functions of the honest value; ``layers_`` for ``layers``.
    """
    tars = [layer_tar(f"file{n}", random.Random(seed * 1000 + n).randbytes(size)) for n in range(layers)]
    blobs = tuple(gzip.compress(tar, 1, mtime=0) for tar in tars)
    config = json.dumps(
        {"architecture": arch, "os": "linux", "config": {"Env": ["A=1"]},
         "rootfs": {"type": "layers", "diff_ids": [Digest.of(tar) for tar in tars]}}
    ).encode()  # fmt: skip
    kinds = (media.DOCKER_CONFIG, media.DOCKER_LAYER_GZIP) if docker else (media.OCI_CONFIG, media.OCI_LAYER_GZIP)
    named = [{"mediaType": kinds[1], "digest": Digest.of(b), "size": len(b)} for b in blobs]
    kind = media.DOCKER_MANIFEST if docker else media.OCI_MANIFEST
    value: dict[str, Any] = {
        "schemaVersion": 2, "mediaType": kind,
        "config": {"mediaType": kinds[0], "digest": Digest.of(config), "size": len(config)}, "layers": named,
    }  # fmt: skip
    for key, change in changes.items():
        key = key.rstrip("_")
        value[key] = change(value.get(key))
    return SmallImage(json.dumps(value).encode(), config, blobs, kind)


def index_of(*entries: dict[str, Any], docker: bool = False) -> tuple[bytes, str]:
    """An index over descriptors, and its media type."""
    kind = media.DOCKER_LIST if docker else media.OCI_INDEX
    return json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": list(entries)}).encode(), kind
