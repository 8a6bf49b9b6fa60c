"""Where a base image comes from: one function for every key that ``base`` may have in a spec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oci_builder.model.errors import FormatError, SpecError
from oci_builder.model.events import Emit, silent
from oci_builder.model.image import Image
from oci_builder.model.spec import DockerBase, HostBase, OciBase, RegistryBase, RootfsBase, Spec
from oci_builder.rootfs.layers import WriteOptions
from oci_builder.store.blobs import DirStore
from oci_builder.transports.admit import admit_image
from oci_builder.transports.base_archive import bring_archive
from oci_builder.transports.host import load_host
from oci_builder.transports.rootfs import RootfsOptions, load_rootfs

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
            # Here and not above: most builds talk to no registry, and its libraries take half of a second to import.
            from oci_builder.transports.registry_policy import RegistryOptions
            from oci_builder.transports.registry_pull import Pins, load_registry

            options = RegistryOptions(limits=limits, plain_http=base.plain_http)
            pins = Pins(base.manifest, base.config)
            pulled = load_registry(
                base.registry, base.digest, store, options, platform=spec.platform, pins=pins, emit=emit
            )
            return Base(pulled.image, base.registry, pulled.manifest)
        case OciBase() as base:
            return _archive(folder / base.oci, "index.json", spec, store, write, emit)
        case DockerBase() as base:
            return _archive(folder / base.docker, "manifest.json", spec, store, write, emit)
        case RootfsBase() as base:
            rootfs = RootfsOptions(exclude=base.exclude, epoch=spec.epoch, write=write, limits=limits)
            return Base(load_rootfs(folder / base.rootfs, store, rootfs, emit))
        case HostBase():
            return Base(load_host(store, epoch=spec.epoch, options=write, limits=limits, emit=emit))
    return Base(Image(_SCRATCH))


def _archive(path: Path, form: str, spec: Spec, store: DirStore, write: WriteOptions, emit: Emit) -> Base:
    """``form`` is the document that the spec's key promises."""
    limits = spec.effective_limits
    base = spec.base
    digest = base.digest if isinstance(base, OciBase) else None
    asked = base.image if isinstance(base, OciBase | DockerBase) else None
    found = bring_archive(
        path, store, write, limits=limits, platform=spec.platform, image=asked or digest or "", emit=emit,
        pack=form == "manifest.json",
    )  # fmt: skip
    if form not in found.documents:
        raise FormatError("archive.missing", f"{path.name}: it has no {form}", where=str(path), expected=form)
    if form == "index.json" and not found.digests:
        raise FormatError(
            "archive.images", f"{path.name}: its index.json holds no image, only its manifest.json does",
            where=str(path), expected=1, actual=0,
        )  # fmt: skip
    if digest is not None and digest not in found.digests:
        raise SpecError(
            "spec.digest", f"{path.name} holds {found.digests[0]}, the spec wants {digest}", where=str(path),
            expected=digest, actual=found.digests[0],
        )  # fmt: skip
    image = admit_image(
        found.config, found.manifest, store, limits=limits, platform=spec.platform, emit=emit, threads=write.threads
    )
    if form == "index.json":
        return Base(image, path.name, found.digests[0])
    return Base(image, found.name, found.manifest.config.digest)
