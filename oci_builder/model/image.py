"""One Image value: config and layers. Every document that an archive needs is derived from it, once.

That both archives share one config holds by construction: there is only one place where config bytes are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import PolicyError
from oci_builder.model.jsontext import dump_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Its bytes lie in a blob store under ``descriptor.digest``.

    Attributes:
        descriptor: media type, digest and size of the blob (the compressed bytes).
        diff_id: digest of the tar (the uncompressed bytes).
        tar_size: bytes of the tar.
        history: its entry in the config's history.
        name: short name for people and records, such as ``base+vllm``; empty for a base's layer.
    """

    descriptor: Descriptor
    diff_id: Digest
    tar_size: int
    history: Mapping[str, Any]
    name: str = ""

    @property
    def compression(self) -> str:
        """``identity``, ``gzip`` or ``zstd``."""
        return media.LAYER_COMPRESSION[self.descriptor.media_type]

    @property
    def tar_descriptor(self) -> Descriptor:
        """The same layer as an uncompressed blob, as the Docker archive's layout names it."""
        return Descriptor(media_type=media.OCI_LAYER, digest=self.diff_id, size=self.tar_size)


@dataclass(frozen=True, slots=True)
class Image:
    """An image: settings and layers, lowest first.

    Attributes:
        settings: the image config without ``rootfs`` and ``history`` (architecture, os, config, created, and what a
            base brought along).
        layers: every layer, base layers first.
        empty_history: history entries of steps without a layer, as (number of layers before it, entry).
        annotations: of the manifest.
        base_layers: how many of ``layers`` came from the base.
    """

    settings: Mapping[str, Any]
    layers: tuple[Layer, ...] = ()
    empty_history: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    annotations: Mapping[str, str] | None = None
    base_layers: int = 0

    def append(self, *layers: Layer, limits: Limits = DEFAULT_LIMITS) -> Image:
        """This image with more layers on top.

        Raises:
            PolicyError: as ``check_room``.
        """
        self.check_room([(layer.name, layer.tar_size) for layer in layers], limits)
        return replace(self, layers=self.layers + layers)

    def check_room(self, new: Sequence[tuple[str, int]], limits: Limits = DEFAULT_LIMITS) -> None:
        """Refuse more layers where an image could not start with them, or no reader take it; ask before they are made.

        Args:
            new: name and uncompressed size of each in bytes; what is known of it before it is made is less.

        Raises:
            PolicyError: ``limit.layers`` (moby/buildkit#3067: 129 layers build, but cannot start), ``limit.layer``,
                ``limit.image``.
        """
        total = len(self.layers) + len(new)
        if total > limits.layers:
            raise PolicyError(
                "limit.layers", f"{len(self.layers)} layers of the base and {len(new)} new ones (one for each set of "
                f"tiers that shares files) are more than {limits.layers}, which overlayfs can stack: take fewer tiers, "
                "or a base with fewer layers",
                expected=f"<= {limits.layers}", actual=total,
            )  # fmt: skip
        for name, size in new:
            if size > limits.layer_size:
                raise _too_large("limit.layer", f"layer {name}", size, "layer_size", limits.layer_size)
        size = sum(layer.tar_size for layer in self.layers) + sum(size for _, size in new)
        if size > limits.image_size:
            raise _too_large("limit.image", "the image", size, "image_size", limits.image_size)

    def with_settings(self, settings: Mapping[str, Any], annotations: Mapping[str, str] | None = None) -> Image:
        """This image with other settings and manifest annotations."""
        return replace(self, settings=settings, annotations=annotations)

    @property
    def history(self) -> list[dict[str, Any]]:
        """All history entries in order."""
        out: list[dict[str, Any]] = []
        for index in range(len(self.layers) + 1):
            out += [dict(entry) for before, entry in self.empty_history if before == index]
            if index < len(self.layers):
                out.append(dict(self.layers[index].history))
        return out

    @property
    def config_bytes(self) -> bytes:
        """The image config, serialised."""
        rootfs = {"type": "layers", "diff_ids": [layer.diff_id for layer in self.layers]}
        return dump_json({**self.settings, "rootfs": rootfs, "history": self.history})

    @property
    def config_descriptor(self) -> Descriptor:
        """Descriptor of the config blob; its digest is the classic Docker image ID."""
        data = self.config_bytes
        return Descriptor(media_type=media.OCI_CONFIG, digest=Digest.of(data), size=len(data))

    def manifest_bytes(self, *, uncompressed: bool = False) -> bytes:
        """The manifest: over the compressed blobs, or over the tars for the Docker archive's own layout."""
        layers = [(layer.tar_descriptor if uncompressed else layer.descriptor).to_json() for layer in self.layers]
        value: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": media.OCI_MANIFEST,
            "config": self.config_descriptor.to_json(),
            "layers": layers,
        }
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        return dump_json(value)

    def manifest_descriptor(self, *, uncompressed: bool = False) -> Descriptor:
        """Descriptor of the manifest; its digest is the image ID in Docker's containerd store."""
        data = self.manifest_bytes(uncompressed=uncompressed)
        return Descriptor(media_type=media.OCI_MANIFEST, digest=Digest.of(data), size=len(data))


def _too_large(code: str, what: str, size: int, name: str, limit: int) -> PolicyError:
    return PolicyError(
        code, f"{what} has {size} bytes uncompressed, the limit is {limit}; raise limits.{name} if that is meant",
        where=what, expected=f"<= {limit}", actual=size,
    )  # fmt: skip
