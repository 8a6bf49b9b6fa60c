"""Where a base image comes from: one function for every key that ``base`` may have in a spec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, DockerArchiveItem, Manifest, validate
from oci_builder.model.errors import FormatError, SpecError, show
from oci_builder.model.events import Emit, silent
from oci_builder.model.image import Image
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import Limits
from oci_builder.model.spec import DockerBase, HostBase, OciBase, RegistryBase, RootfsBase, Spec
from oci_builder.rootfs.layers import WriteOptions
from oci_builder.store.blobs import DirStore
from oci_builder.transports.host import load_host
from oci_builder.transports.members import Members, read_members
from oci_builder.transports.registry_policy import RegistryOptions
from oci_builder.transports.registry_pull import Pins, load_registry
from oci_builder.transports.resolve import admit_image, resolve_manifest
from oci_builder.transports.rootfs import RootfsOptions, load_rootfs
from oci_builder.wire.compress import BLOCK, Codec, encode_layer, sniff

_SCRATCH = {"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}}


@dataclass(frozen=True, slots=True)
class Base:
    """A loaded base.

    Attributes:
        image: its layers are in the store.
        name: reference or file name, for ``org.opencontainers.image.base.name``.
        digest: of its manifest where it had one, else of its config; empty for none.
    """

    image: Image
    name: str = ""
    digest: str = ""


def load_base(spec: Spec, folder: Path, store: DirStore, write: WriteOptions, emit: Emit = silent) -> Base:
    """Load the spec's base.

    Args:
        folder: relative paths of the spec are relative to it.

    Raises:
        OciBuilderError: as each source does.
    """
    limits = spec.effective_limits
    match spec.base:
        case RegistryBase() as base:
            options = RegistryOptions(limits=limits, plain_http=base.plain_http)
            pins = Pins(base.manifest, base.config)
            pulled = load_registry(
                base.registry, base.digest, store, options, platform=spec.platform, pins=pins, emit=emit
            )
            return Base(pulled.image, base.registry, pulled.manifest)
        case OciBase() as base:
            return _oci(folder / base.oci, base.digest, spec.platform, store, limits, emit)
        case DockerBase() as base:
            return _docker(folder / base.docker, store, limits, emit)
        case RootfsBase() as base:
            rootfs = RootfsOptions(exclude=base.exclude, epoch=spec.epoch, write=write, limits=limits)
            return Base(load_rootfs(folder / base.rootfs, store, rootfs, emit))
        case HostBase():
            return Base(load_host(store, epoch=spec.epoch, options=write, limits=limits, emit=emit))
    return Base(Image(_SCRATCH))


def _oci(path: Path, digest: str | None, platform: str, store: DirStore, limits: Limits, emit: Emit) -> Base:
    members = read_members(path, store, limits)
    index = members.document("index.json", limits.document)
    if "oci-layout" not in members.blobs:
        raise FormatError("layout.version", f"{path.name}: no oci-layout: this is no OCI layout", where=str(path))

    def read(descriptor: Descriptor) -> bytes:
        if descriptor.id == Digest.of(index):
            return index
        return members.document(descriptor.id.blob_path, limits.document)

    root = Descriptor(media_type=media.OCI_INDEX, digest=Digest.of(index), size=len(index))
    resolved = resolve_manifest(root, read, platform, limits)
    if digest is not None and digest not in (resolved.descriptor.digest, *resolved.trail):
        raise SpecError(
            "spec.digest", f"{path.name} holds {resolved.descriptor.digest}, the spec wants {digest}", where=str(path),
            expected=digest, actual=resolved.descriptor.digest,
        )  # fmt: skip
    config = members.document(resolved.manifest.config.id.blob_path, limits.document)
    image = admit_image(config, resolved.manifest, store, limits=limits, platform=platform, emit=emit)
    return Base(image, path.name, resolved.descriptor.digest)


def _docker(path: Path, store: DirStore, limits: Limits, emit: Emit) -> Base:
    members = read_members(path, store, limits)
    item = _docker_item(members, limits)
    config = members.document(item.config, limits.document)
    layers = [_as_layer(members.digest(name), store) for name in item.layers or ()]
    manifest = Manifest(
        schema_version=2,
        config=Descriptor(media_type=media.OCI_CONFIG, digest=Digest.of(config), size=len(config)),
        layers=tuple(layers),
    )
    image = admit_image(config, manifest, store, limits=limits, emit=emit)
    return Base(image, (item.repo_tags or (path.name,))[0], manifest.config.digest)


def _docker_item(members: Members, limits: Limits) -> DockerArchiveItem:
    where = f"{members.where}: manifest.json"
    value = load_json(members.document("manifest.json", limits.docker_manifest), where, limits)
    if not isinstance(value, list) or len(value) != 1:
        count = len(value) if isinstance(value, list) else 0
        raise FormatError("archive.manifest", f"{where}: {count} images, expected one", where=where, actual=count)
    item = validate(DockerArchiveItem, value[0], where, limits)
    stem = Path(item.config).name.removesuffix(".json")
    if stem not in (item.config, members.digest(item.config).hex) and len(stem) == 64:
        raise FormatError(
            "archive.config_name", f"{where}: the config {show(item.config)} is not what its name says", where=where
        )
    return item


def _as_layer(digest: Digest, store: DirStore) -> Descriptor:
    """The layer's descriptor; a plain tar is compressed once, its tar bytes stay (its diff_id proves it)."""
    blob = store.open(digest)
    compression = sniff(blob.pread(8, 0))
    if compression != "identity":
        return Descriptor(media_type=media.oci_layer(compression), digest=digest, size=blob.size)
    known = store.recall(digest, "gzip")
    if known is None or not store.has(Digest.parse(known["digest"])):
        with store.ingest("docker-layer") as ingest:
            made = encode_layer(blob.chunks(BLOCK), ingest.write, Codec(), threads=2)
            ingest.commit(made.digest)
        store.remember(made.digest, "tar", {"diff_id": made.diff_id, "tar_size": made.tar_size})
        known = {"digest": made.digest, "size": made.size}
        store.remember(digest, "gzip", known)
    return Descriptor(media_type=media.OCI_LAYER_GZIP, digest=known["digest"], size=known["size"])
