"""The image in an OCI archive or layout, ready to be pushed: its documents' exact bytes, and each blob as a range."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oci_builder.model.documents import Descriptor, Manifest, parse_document
from oci_builder.model.errors import FormatError, OciBuilderError, SpecError, read_error
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.transports.opened import ImageFile
from oci_builder.transports.opened_members import OpenOptions
from oci_builder.transports.registry_reference import Reference, parse_reference
from oci_builder.transports.resolve import Resolved
from oci_builder.wire.compress import sniff
from oci_builder.wire.source import FileRange

BASE_NAME = "org.opencontainers.image.base.name"


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
        FormatError, IntegrityError, PolicyError: what ``verify`` would find in its documents; ``archive.missing``
            where there is no OCI layout.
        TransportError: ``io.*``.
    """

    def __init__(
        self, path: Path, platform: str = "linux/amd64", limits: Limits = DEFAULT_LIMITS, image: str = ""
    ) -> None:
        super().__init__(path, OpenOptions(platform=platform, limits=limits, image=image))
        self.resolved: Resolved

    def __enter__(self) -> PushSource:
        try:
            self.resolved = self._resolve()
        except OSError as error:
            self.files.close()
            raise read_error(error, f"reading {self.path.name}") from None
        except OciBuilderError:
            self.files.close()
            raise
        return self

    @property
    def blobs(self) -> tuple[PushBlob, ...]:
        """Config and layers, each once."""
        manifest = self.resolved.manifest
        found = {d.digest: d for d in (*manifest.layers, manifest.config)}
        return tuple(PushBlob(d, self.parts.get(d.id.blob_path)) for d in found.values())

    def base_repository(self, target: Reference) -> str:
        """The repository that the image's base came from, where it is another one of the target's registry; else empty.

        Its blobs need not travel: the registry may take them from there.
        """
        try:
            base = parse_reference((self.resolved.manifest.annotations or {}).get(BASE_NAME, ""))
        except OciBuilderError:
            return ""
        return base.repository if base.host == target.host and base.repository != target.repository else ""

    def _resolve(self) -> Resolved:
        source = self.open()
        if source is not None:
            compression = sniff(source.pread(8, 0))
            raise SpecError(
                "spec.archive",
                f"{self.path.name} is {compression}-compressed as a whole; push the OCI archive of the same image"
                " (runtime.oci.tar), whose layers are stored as a registry takes them",
                where=str(self.path), actual=compression,
            )  # fmt: skip
        image = self.found()
        if image.manifest is None:
            raise FormatError(
                "archive.missing", f"{self.path.name}: no index.json: this is no OCI layout", where=str(self.path),
                expected="index.json",
            )  # fmt: skip
        manifest = parse_document(Manifest, image.data, image.manifest.digest, self.options.limits)
        return Resolved(image.manifest, manifest, image.data)
