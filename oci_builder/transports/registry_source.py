"""The image in an OCI archive or layout, ready to be pushed: its documents' exact bytes, and each blob as a range."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import FormatError, IntegrityError, OciBuilderError, SpecError, disk_error, show
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.transports.opened import ImageFile, OpenOptions
from oci_builder.transports.resolve import Resolved, resolve_manifest
from oci_builder.wire.compress import sniff
from oci_builder.wire.source import FileRange


@dataclass(frozen=True, slots=True)
class PushBlob:
    """A blob to upload; its bytes are judged while they are sent."""

    descriptor: Descriptor
    source: FileRange


class PushSource(ImageFile):
    """Use ``with``.

    Raises (entering):
        SpecError: ``spec.path``; ``spec.archive`` for a compressed archive, which holds no layers as registries want
            them.
        FormatError, IntegrityError, PolicyError: what is wrong with its documents.
        TransportError: ``io.*``.
    """

    def __init__(self, path: Path, platform: str = "linux/amd64", limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(path, OpenOptions(platform=platform, limits=limits))
        self.resolved: Resolved

    def __enter__(self) -> PushSource:
        try:
            self._read()
            self.resolved = self._resolve()
        except OSError as error:
            self._files.close()
            raise disk_error(error, f"reading {self.path.name}") from None
        except OciBuilderError:
            self._files.close()
            raise
        return self

    @property
    def blobs(self) -> tuple[PushBlob, ...]:
        """Config and layers, each once."""
        manifest = self.resolved.manifest
        found = {d.digest: d for d in (*manifest.layers, manifest.config)}
        return tuple(PushBlob(d, self._parts.get(d.id.blob_path)) for d in found.values())

    def _read(self) -> None:
        if self.path.is_dir():
            self._read_folder()
            return
        if not self.path.exists():
            raise SpecError("spec.path", f"no such archive or layout: {show(str(self.path))}", where=str(self.path))
        source = self._open(self.path, 0)
        compression = sniff(source.pread(8, 0))
        if compression != "identity":
            raise SpecError(
                "spec.archive",
                f"{self.path.name} is {compression}-compressed as a whole; push the OCI archive of the same image"
                " (runtime.oci.tar), whose layers are stored as a registry takes them",
                where=str(self.path), actual=compression,
            )  # fmt: skip
        self._read_tar(source)

    def _resolve(self) -> Resolved:
        limits = self.options.limits
        for name in ("oci-layout", "index.json"):
            if name not in self._parts.ranges:
                raise FormatError(
                    "archive.missing", f"{self.path.name}: no {name}: this is no OCI layout", where=str(self.path),
                    expected=name,
                )  # fmt: skip
        index = self._parts.read("index.json", limits.document)
        root = Descriptor(media_type=media.OCI_INDEX, digest=Digest.of(index), size=len(index))
        return resolve_manifest(
            root, lambda d: index if d is root else self._document(d), self.options.platform, limits
        )

    def _document(self, descriptor: Descriptor) -> bytes:
        data = self._parts.read(descriptor.id.blob_path, self.options.limits.document)
        actual = Digest.of(data)
        if actual != descriptor.id or len(data) != descriptor.size:
            raise IntegrityError(
                "blob.digest", f"{self.path.name}: {descriptor.digest} hashes to {actual}", where=descriptor.digest,
                expected=descriptor.digest, actual=actual,
            )  # fmt: skip
        return data


