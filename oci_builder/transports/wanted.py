"""Which of an archive's members make the image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from oci_builder.judge.archive import Judged
from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, ImageConfig, Index, parse_document
from oci_builder.model.errors import FormatError, PolicyError, show
from oci_builder.model.limits import Limits
from oci_builder.transports.resolve import Resolved, check_layers, resolve_manifest
from oci_builder.wire.source import FileRange

Chunks = Iterator[bytes | memoryview]


@dataclass(slots=True)
class Parts:
    """An archive's members as ranges of an open file, its symbolic links by name, and names of its folders."""

    where: str
    ranges: dict[str, FileRange] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)

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
        config: the config's bytes.
        layers: lowest first.
        manifest: its descriptor, and ``data`` its bytes; None where the archive has no manifest.
        names: what the archive calls it.
    """

    config: bytes
    layers: tuple[WantedLayer, ...]
    manifest: Descriptor | None = None
    data: bytes = b""
    names: tuple[str, ...] = ()


def wanted_image(judged: Judged) -> WantedImage:
    """The image that the judge found to be meant. It has one, whose documents and layers are all there."""
    image = judged.image
    if image is None:
        raise ValueError("no image was found")
    members = [member for member in image.layers if member is not None]
    pairs = list(zip(members, image.config.rootfs.diff_ids, strict=True))
    config, names = image.config_member.data or b"", tuple(sorted(image.names))
    if image.manifest is None:
        return WantedImage(config, tuple(WantedLayer(m.name, Digest(d)) for m, d in pairs), names=names)
    manifest = judged.contents.blob(image.manifest.id)
    layers = tuple(
        WantedLayer(m.name, Digest(d), m.digest, m.size, m.layer.compression if m.layer else None) for m, d in pairs
    )
    return WantedImage(config, layers, image.manifest, (manifest.data if manifest else None) or b"", names)


def guess_layers(parts: Parts, platform: str, image: str, limits: Limits) -> tuple[WantedLayer, ...]:
    """The layers of an OCI layout of which only some members are known yet. A guess: the judge has not seen them.

    Raises:
        OciBuilderError: it cannot be told (yet).
    """
    found = _resolve(parts, platform, image, limits)
    config = parse_document(ImageConfig, parts.read(found.manifest.config.id.blob_path, limits.document), "", limits)
    check_layers(found.manifest, config, "manifest")
    return tuple(
        WantedLayer(d.id.blob_path, Digest(diff_id), d.id, d.size, media.LAYER_COMPRESSION[d.media_type])
        for d, diff_id in zip(found.manifest.layers, config.rootfs.diff_ids, strict=True)
    )


def index_trail(parts: Parts, manifest: Digest, limits: Limits) -> tuple[Digest, ...]:
    """Digests of the indexes that lead to a manifest of an archive that was judged, ``index.json`` first.

    Raises:
        OciBuilderError: an index cannot be read.
    """
    root = parts.read("index.json", limits.document)
    return _trail(parts, Digest.of(root), root, manifest, limits, set()) or ()


def _trail(
    parts: Parts, digest: Digest, data: bytes, wanted: Digest, limits: Limits, seen: set[Digest]
) -> tuple[Digest, ...] | None:
    seen.add(digest)
    for descriptor in parse_document(Index, data, str(digest), limits).manifests:
        if descriptor.id == wanted:
            return (digest,)
        name = descriptor.id.blob_path
        if descriptor.media_type not in media.INDEX_TYPES or descriptor.id in seen or name not in parts.ranges:
            continue
        below = _trail(parts, descriptor.id, parts.read(name, limits.document), wanted, limits, seen)
        if below:
            return (digest, *below)
    return None


def _resolve(parts: Parts, platform: str, image: str, limits: Limits) -> Resolved:
    index = parts.read("index.json", limits.document)
    root = Descriptor(media_type=media.OCI_INDEX, digest=Digest.of(index), size=len(index))

    def read(descriptor: Descriptor) -> bytes:
        return index if descriptor is root else parts.read(descriptor.id.blob_path, limits.document)

    return resolve_manifest(root, read, platform, limits, image=image)
