"""Which of an archive's members make the image: from the documents of either form, each checked by its digest."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, DockerArchiveItem, ImageConfig, parse_document, validate
from oci_builder.model.errors import FormatError, IntegrityError, PolicyError, show
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import Limits
from oci_builder.transports.resolve import check_layers, check_platform, resolve_manifest
from oci_builder.wire.source import FileRange


@dataclass(slots=True)
class Parts:
    """An archive's members as ranges of an open file, and its symbolic links, by name."""

    where: str
    ranges: dict[str, FileRange] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def real(self, name: str) -> str:
        """The member that a name means: docker save links a layer that another image has already (one hop)."""
        return self.links.get(name, name)

    def get(self, name: str) -> FileRange:
        """A member.

        Raises:
            FormatError: ``archive.missing``.
        """
        found = self.ranges.get(self.real(name))
        if found is None:
            raise FormatError(
                "archive.missing", f"{self.where}: there is no member {show(name)}", where=self.where, expected=name
            )
        return found

    def read(self, name: str, limit: int) -> bytes:
        """A small member.

        Raises:
            FormatError: ``archive.missing``. PolicyError: ``limit.document``.
        """
        found = self.get(name)
        if found.size > limit:
            raise PolicyError(
                "limit.document", f"{self.where}: {show(name)} has {found.size} bytes, the limit is {limit}",
                where=self.where,
            )  # fmt: skip
        return found.pread(found.size, 0)


def link_target(name: str, link: bytes) -> str:
    """The member that a symbolic link inside an archive points at, by name."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link.decode("utf-8", "backslashreplace")))


@dataclass(frozen=True, slots=True)
class WantedLayer:
    """A layer of the image.

    Attributes:
        name: the member that holds it.
        diff_id: of its tar.
        digest, size, compression: as the manifest has them; ``None`` where only a Docker ``manifest.json`` is.
    """

    name: str
    diff_id: Digest
    digest: Digest | None = None
    size: int | None = None
    compression: str | None = None


@dataclass(frozen=True, slots=True)
class WantedImage:
    """The image that an archive holds.

    Attributes:
        manifest: its digest; empty when the archive has no manifest.
        config: the config's bytes.
        layers: lowest first.
    """

    manifest: str
    config: bytes
    layers: tuple[WantedLayer, ...]


def find_image(parts: Parts, platform: str, limits: Limits) -> WantedImage:
    """The platform's image: from the OCI layout where there is one, else from Docker's ``manifest.json``.

    Raises:
        FormatError: ``archive.missing``, ``archive.manifest``, ``archive.config_name``, ``layout.version``,
            ``platform.*``, ``json.*``, ``media.*``, ``config.*``.
        IntegrityError: ``blob.size``, ``blob.digest`` of a document.
        PolicyError: ``limit.*``, ``media.foreign``.
    """
    if "index.json" in parts.ranges and ("oci-layout" in parts.ranges or "manifest.json" not in parts.ranges):
        return _oci(parts, platform, limits)
    if "manifest.json" in parts.ranges:
        return _docker(parts, platform, limits)
    raise FormatError(
        "archive.missing", f"{parts.where}: neither index.json nor manifest.json: this is no image", where=parts.where
    )


def _oci(parts: Parts, platform: str, limits: Limits) -> WantedImage:
    _check_version(parts, limits)
    index = parts.read("index.json", limits.document)
    root = Descriptor(media_type=media.OCI_INDEX, digest=Digest.of(index), size=len(index))

    def read(descriptor: Descriptor) -> bytes:
        return index if descriptor is root else _document(parts, descriptor, limits)

    found = resolve_manifest(root, read, platform, limits)
    config = _document(parts, found.manifest.config, limits)
    parsed = _config(config, platform, limits)
    check_layers(found.manifest, parsed, found.descriptor.digest)
    layers = tuple(
        WantedLayer(d.id.blob_path, Digest(diff_id), d.id, d.size, media.LAYER_COMPRESSION[d.media_type])
        for d, diff_id in zip(found.manifest.layers, parsed.rootfs.diff_ids, strict=True)
    )
    return WantedImage(found.descriptor.digest, config, layers)


def _check_version(parts: Parts, limits: Limits) -> None:
    if "oci-layout" not in parts.ranges:
        raise FormatError("layout.version", f"{parts.where}: no oci-layout: this is no OCI layout", where=parts.where)
    value = load_json(parts.read("oci-layout", limits.document), f"{parts.where}: oci-layout", limits)
    version = value.get("imageLayoutVersion") if isinstance(value, dict) else None
    if version != "1.0.0":
        raise FormatError(
            "layout.version", f"{parts.where}: imageLayoutVersion is {show(repr(version)[:60])}", where=parts.where,
            expected="1.0.0", actual=repr(version)[:60],
        )  # fmt: skip


def _document(parts: Parts, descriptor: Descriptor, limits: Limits) -> bytes:
    data = parts.read(descriptor.id.blob_path, limits.document)
    where = f"{parts.where}: {descriptor.digest}"
    if len(data) != descriptor.size:
        raise IntegrityError(
            "blob.size", f"{where}: {len(data)} bytes, expected {descriptor.size}", where=where,
            expected=descriptor.size, actual=len(data),
        )  # fmt: skip
    if Digest.of(data) != descriptor.id:
        raise IntegrityError(
            "blob.digest", f"{where}: the bytes hash to {Digest.of(data)}; fetch the archive again", where=where,
            expected=descriptor.digest, actual=Digest.of(data),
        )  # fmt: skip
    return data


def _config(data: bytes, platform: str, limits: Limits) -> ImageConfig:
    where = f"config {Digest.of(data)}"
    config = parse_document(ImageConfig, data, where, limits)
    check_platform(config, platform, where)
    return config


def _docker(parts: Parts, platform: str, limits: Limits) -> WantedImage:
    where = f"{parts.where}: manifest.json"
    value = load_json(parts.read("manifest.json", limits.docker_manifest), where, limits)
    if not isinstance(value, list) or len(value) != 1:
        count = len(value) if isinstance(value, list) else 0
        raise FormatError("archive.manifest", f"{where}: {count} images, expected one", where=where, actual=count)
    item = validate(DockerArchiveItem, value[0], where, limits)
    config = parts.read(item.config, limits.document)
    stem = PurePosixPath(item.config).name.removesuffix(".json")
    if len(stem) == 64 and stem != Digest.of(config).hex:
        raise FormatError(
            "archive.config_name", f"{where}: the config {show(item.config)} is not what its name says", where=where,
            expected=stem, actual=Digest.of(config).hex,
        )  # fmt: skip
    parsed = _config(config, platform, limits)
    names = item.layers or ()
    if parsed.rootfs.type != "layers" or len(names) != len(parsed.rootfs.diff_ids):
        raise FormatError(
            "config.layers", f"{where}: {len(names)} layers, {len(parsed.rootfs.diff_ids)} diff_ids in the config",
            where=where, expected=len(parsed.rootfs.diff_ids), actual=len(names),
        )  # fmt: skip
    layers = (WantedLayer(name, Digest(d)) for name, d in zip(names, parsed.rootfs.diff_ids, strict=True))
    return WantedImage("", config, tuple(layers))
