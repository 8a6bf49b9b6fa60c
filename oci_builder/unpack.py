"""``unpack``: an image's file system into a folder, every byte of it verified on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.errors import FormatError, IntegrityError, OciBuilderError, PolicyError, disk_error
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.report import Finding
from oci_builder.rootfs.apply import ApplyOptions, RootTree
from oci_builder.rootfs.destination import Destination
from oci_builder.transports.opened import ImageFile
from oci_builder.transports.opened_members import OpenOptions
from oci_builder.transports.wanted import Chunks, WantedImage, WantedLayer
from oci_builder.wire.compress import Options, decode_chunks, sniff
from oci_builder.wire.source import Ahead
from oci_builder.wire.tar import TarReader
from oci_builder.wire.verified import VerifiedReader


@dataclass(frozen=True, slots=True)
class UnpackOptions:
    """How to unpack.

    Attributes:
        platform: which image of an index.
        threads: decompressing threads; 1 does everything in the caller's thread.
        image: name or digest of the one that is meant, where there are several.
        strict: hold the layers to our own rules (no devices, no fifos, no names twice, links after their targets).
    """

    platform: str = "linux/amd64"
    limits: Limits = DEFAULT_LIMITS
    threads: int = 2
    strict: bool = False
    image: str = ""


@dataclass(frozen=True, slots=True)
class UnpackReport:
    """What was unpacked.

    Attributes:
        manifest: digest of the manifest; of the config where the archive has no manifest.
        config: the image config's bytes.
        summary: counts: layers, entries, bytes, and entries by kind.
        warnings: what could not be as the image says, one a kind.
    """

    folder: Path
    manifest: str
    config: bytes
    summary: dict[str, int]
    warnings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything by name."""
        return {
            "folder": str(self.folder),
            "manifest": self.manifest,
            "config": Digest.of(self.config),
            "summary": self.summary,
            "warnings": [finding.to_json() for finding in self.warnings],
        }


def unpack_image(
    archive: Path, folder: Path, options: UnpackOptions | None = None, emit: Emit = silent
) -> UnpackReport:
    """Unpack an OCI archive, OCI layout folder or Docker archive.

    ``folder`` must be absent or empty. It is there whole, or (after any error) as it was. As root, owners are the
    image's and standard devices are made; otherwise everything is the caller's and devices are left out. Data is handed
    to the kernel and not forced to the disk.

    Raises:
        ConflictError: ``unpack.not_empty``.
        IntegrityError: ``blob.size``, ``blob.digest``, ``layer.diff_id``.
        SpecError, FormatError, PolicyError: what is wrong with the archive.
        TransportError: ``io.*``.
    """
    options = options or UnpackOptions()
    task = f"unpack {archive.name}"
    with Destination(folder) as place:
        how = OpenOptions(
            options.platform, options.limits, options.threads, Path(f"/proc/self/fd/{place.fd}"),
            lambda size: emit(Event("advance", task, size)), options.image,
        )  # fmt: skip
        tree = RootTree(place.fd, ApplyOptions(archive.name, options.limits, options.strict))
        try:
            with ImageFile(archive, how) as file:
                emit(Event("start", task, total=_size(archive)))
                total = 0
                for layer, chunks in file.layers():
                    total += _apply(tree, layer, chunks, options)
                    _require_size(total, archive, options.limits)
                image = file.image or file.found()
            tree.finish()
        except OSError as error:
            raise disk_error(error, f"reading {archive.name}") from None
        finally:
            tree.close()
        place.commit()
    emit(Event("done", task))
    return _report(folder, image, (*file.warnings, *tree.notes.findings()), tree)


def _size(archive: Path) -> int:
    return archive.stat().st_size if archive.is_file() else 0


def _require_size(total: int, archive: Path, limits: Limits) -> None:
    if total > limits.image_size:
        raise PolicyError(
            "limit.image", f"{archive.name}: its layers have over {limits.image_size} bytes; raise limits.image_size if"
            " this image is really meant to be so large", where=archive.name, expected=f"<= {limits.image_size}",
            actual=total,
        )  # fmt: skip


def _report(folder: Path, image: WantedImage, warnings: tuple[Finding, ...], tree: RootTree) -> UnpackReport:
    counts = tree.counts
    summary = {"layers": counts.layers, "entries": counts.entries, "bytes": counts.bytes, **counts.kinds}
    manifest = image.manifest.digest if image.manifest else Digest.of(image.config)
    return UnpackReport(folder, manifest, image.config, summary, warnings)


def _apply(tree: RootTree, layer: WantedLayer, chunks: Chunks, options: UnpackOptions) -> int:
    """Apply one layer and prove that its bytes are the layer's; its uncompressed size."""
    where = f"layer {layer.digest or layer.name}"
    head = next(chunks, b"")
    compression = sniff(head)
    if layer.compression not in (None, compression):
        raise FormatError(
            "media.mismatch", f"{where}: declared as {layer.compression}, the bytes are {compression}", where=where,
            expected=layer.compression, actual=compression,
        )  # fmt: skip
    source = _Source(head, chunks)
    blob: Iterable[bytes | memoryview] = source
    if layer.digest is not None and layer.size is not None:
        blob = VerifiedReader(source, layer.digest, layer.size, where)
    tar = _Hashed()
    how = Options(options.limits, where, options.threads, options.strict, tree.notes.add)
    with _ahead(blob, options) as verified:
        try:
            with _ahead(tar.hash(decode_chunks(verified, compression, how)), options) as decoded:
                tree.apply(
                    TarReader(decoded, limits=options.limits, where=where, strict=options.strict, warn=tree.notes.add)
                )
        except FormatError:
            # That the bytes are not the layer's explains whatever else is wrong with them.
            if not source.broken:
                _drain(verified)
            raise
        _drain(verified)
    tar.require(layer.diff_id, where)
    return tar.size


def _ahead(
    stream: Iterable[bytes | memoryview], options: UnpackOptions
) -> AbstractContextManager[Iterable[bytes | memoryview]]:
    return Ahead(stream) if options.threads > 1 else nullcontext(stream)


def _drain(stream: Iterable[bytes | memoryview]) -> None:
    for _ in stream:
        pass


class _Source:
    """A blob's bytes; ``broken`` says that it was the reading of them that failed."""

    def __init__(self, head: bytes | memoryview, rest: Chunks) -> None:
        self._head: bytes | memoryview = head
        self._rest = rest
        self.broken = False

    def __iter__(self) -> Chunks:
        head, self._head = self._head, b""
        if len(head):
            yield head
        try:
            yield from self._rest
        except OciBuilderError:
            self.broken = True
            raise


class _Hashed:
    """The digest of a stream that passes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.size = 0

    def hash(self, chunks: Iterator[bytes | memoryview]) -> Chunks:
        """Pass ``chunks`` on."""
        for chunk in chunks:
            self._hash.update(chunk)
            self.size += len(chunk)
            yield chunk

    def require(self, expected: Digest, where: str) -> None:
        """Compare.

        Raises:
            IntegrityError: ``layer.diff_id``.
        """
        actual = Digest.from_hex(self._hash.hexdigest())
        if actual != expected:
            raise IntegrityError(
                "layer.diff_id", f"{where}: its tar hashes to {actual}, the config says {expected}", where=where,
                expected=expected, actual=actual,
            )  # fmt: skip
