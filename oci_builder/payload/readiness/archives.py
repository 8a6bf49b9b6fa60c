"""Images as layers of facts: an archive in one pass over its bytes, an OCI layout folder blob by blob.

An archive's members come in any order, and its documents often last. So every member that is not a document is read as
a layer while it passes, and what the documents name is laid together afterwards. Digests are ``verify``'s work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

from oci_builder.judge.choice import fits, not_there
from oci_builder.judge.names import image_name
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, DockerArchiveItem, ImageConfig, parse_document, validate
from oci_builder.model.errors import FormatError, OciBuilderError, PolicyError, show
from oci_builder.model.events import Emit, Event
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import Limits
from oci_builder.model.media import OCI_INDEX
from oci_builder.payload.readiness.collect import entries_delta, io_error, layer_delta
from oci_builder.payload.readiness.tree import Delta, Tree, overlay
from oci_builder.transports.resolve import resolve_manifest
from oci_builder.wire.compress import Options, decode_chunks, sniff
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import Kind, TarEntry, TarReader

_MEMBER = re.compile(rb"(?:blobs(?:/.*)?|oci-layout|index\.json|manifest\.json|repositories|[0-9a-f]{64}(?:[./].*)?)\Z")
_DOCUMENT = re.compile(rb"\s*[{\[]")


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read: limits, decompression threads, platform of a multi-platform index, progress, which image."""

    limits: Limits
    threads: int
    platform: str
    emit: Emit
    image: str = ""


class Blobs(Protocol):
    """Documents and layers by the names that an image's documents use."""

    def document(self, name: bytes) -> bytes | None:
        """The bytes of a document; None when there is none of that name."""

    def layer(self, name: bytes) -> Delta:
        """A layer's facts; raises what reading it raised."""


def read_file(path: Path, reading: Reading) -> Tree:
    """The final tree of an image archive, or of a tar of a tree, compressed or not.

    Raises:
        FormatError, PolicyError: the bytes are not what they claim, or over a limit.
        TransportError: ``io.*``.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise io_error(error, str(path)) from None
    try:
        source = FileRange(fd, 0, os.fstat(fd).st_size)
        return _read_stream(str(path), source, reading)
    except OSError as error:
        raise io_error(error, str(path)) from None
    finally:
        os.close(fd)


def _read_stream(where: str, source: FileRange, reading: Reading) -> Tree:
    # The outer stream is the whole archive: its bound is the image's, not one layer's.
    outer = replace(reading.limits, layer_size=reading.limits.image_size, entry_size=reading.limits.image_size)
    options = Options(outer, where, reading.threads)
    chunks = decode_chunks(_counted(where, source, reading.emit), sniff(source.pread(4, 0)), options)
    reader = TarReader(chunks, limits=outer, where=where)
    # An entry for the root itself says nothing; the first real name tells an image from a tree.
    entries = (entry for entry in reader if entry.name)
    first = next(entries, None)
    if first is None:
        return Tree({})
    everything = chain([first], entries)
    if not _MEMBER.match(first.name):
        return Tree(overlay([entries_delta(reader, everything)]))
    return image_tree(_Members.read(where, reader, everything, reading), where, reading)


def _counted(task: str, source: FileRange, emit: Emit) -> Iterator[bytes]:
    emit(Event("start", f"read {task}", total=source.size))
    for chunk in source.chunks():
        yield chunk
        emit(Event("advance", f"read {task}", amount=len(chunk)))
    emit(Event("done", f"read {task}"))


@dataclass(slots=True)
class _Members:
    """An archive's members after the one pass."""

    where: str
    documents: dict[bytes, bytes] = field(default_factory=dict)
    layers: dict[bytes, Delta | OciBuilderError] = field(default_factory=dict)
    links: dict[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, where: str, reader: TarReader, entries: Iterable[TarEntry], reading: Reading) -> _Members:
        out = cls(where)
        for count, entry in enumerate(entries):
            if count >= reading.limits.archive_members:
                raise PolicyError("limit.members", f"{where}: more than {count} members", where=where)
            if entry.name in out.documents or entry.name in out.layers:
                raise FormatError("archive.duplicate", f"{where}: {show(entry.name)} is there twice", where=where)
            if entry.kind == Kind.FILE:
                out._take(entry, reader, reading)
            elif entry.kind in (Kind.SYMLINK, Kind.HARDLINK):
                out.links[entry.name] = entry.link
        return out

    def _take(self, entry: TarEntry, reader: TarReader, reading: Reading) -> None:
        data = reader.data()
        head = bytes(next(data, b""))
        if entry.size <= reading.limits.document and (not head or _DOCUMENT.match(head)):
            self.documents[entry.name] = b"".join([head, *data])
            return
        where = f"{self.where}: {show(entry.name)}"
        options = Options(reading.limits, where, reading.threads)
        try:
            chunks = decode_chunks(chain([head], data), sniff(head), options)
            self.layers[entry.name] = layer_delta(chunks, where, limits=reading.limits)
        except (FormatError, PolicyError) as error:
            # A blob that no image names (a signature, an SBOM) need not be a layer; one that is named raises this.
            self.layers[entry.name] = error

    def document(self, name: bytes) -> bytes | None:
        return self.documents.get(self._named(name))

    def layer(self, name: bytes) -> Delta:
        found = self.layers.get(self._named(name))
        if isinstance(found, OciBuilderError):
            raise found
        if found is None:
            raise _missing(self.where, name)
        return found

    def _named(self, name: bytes) -> bytes:
        """``name``, or what a link of that name points to: classic ``docker save`` shares layers by links."""
        link = self.links.get(name)
        if link is None:
            return name
        parts = [p for p in link.split(b"/") if p not in (b"", b".", b"..")]
        return b"/".join(parts)


@dataclass(frozen=True, slots=True)
class Layout:
    """An OCI layout folder; blobs are read when asked for."""

    root: Path
    reading: Reading

    def document(self, name: bytes) -> bytes | None:
        """See ``Blobs.document``."""
        path = self.root / os.fsdecode(name)
        try:
            if not path.is_file() or path.stat().st_size > self.reading.limits.document:
                return None
            return path.read_bytes()
        except OSError as error:
            raise io_error(error, str(path)) from None

    def layer(self, name: bytes) -> Delta:
        """See ``Blobs.layer``."""
        path = self.root / os.fsdecode(name)
        try:
            with path.open("rb") as file:
                source = FileRange(file.fileno(), 0, os.fstat(file.fileno()).st_size)
                options = Options(self.reading.limits, str(path), self.reading.threads)
                chunks = decode_chunks(
                    _counted(str(path), source, self.reading.emit), sniff(source.pread(4, 0)), options
                )
                return layer_delta(chunks, str(path), limits=self.reading.limits)
        except FileNotFoundError:
            raise _missing(str(self.root), name) from None
        except OSError as error:
            raise io_error(error, str(path)) from None


def image_tree(blobs: Blobs, where: str, reading: Reading) -> Tree:
    """The final tree of the one image that ``blobs`` holds for the platform.

    Raises:
        FormatError: ``archive.missing``, ``platform.missing``, ``platform.ambiguous``, ``json.*``, ``media.*``; what
            reading its layers raised.
    """
    config, layers = _oci(blobs, where, reading) if blobs.document(b"index.json") else _docker(blobs, where, reading)
    document = parse_document(ImageConfig, _need(blobs, where, config), f"{where}: config", reading.limits)
    env = dict(e.partition("=")[::2] for e in (document.config.env if document.config else None) or ())
    return Tree(overlay([blobs.layer(name) for name in layers]), env)


def _oci(blobs: Blobs, where: str, reading: Reading) -> tuple[bytes, list[bytes]]:
    data = _need(blobs, where, b"index.json")
    root = Descriptor(media_type=OCI_INDEX, digest=Digest.of(data), size=len(data))

    def read(descriptor: Descriptor) -> bytes:
        return data if descriptor is root else _need(blobs, where, _blob(descriptor))

    manifest = resolve_manifest(
        root, read, reading.platform, reading.limits, image=reading.image
    ).manifest
    return _blob(manifest.config), [_blob(layer) for layer in manifest.layers]


def _docker(blobs: Blobs, where: str, reading: Reading) -> tuple[bytes, list[bytes]]:
    value = load_json(_need(blobs, where, b"manifest.json"), f"{where}: manifest.json", reading.limits)
    if not isinstance(value, list) or not value:
        raise FormatError("json.field", f"{where}: manifest.json is no list of images", where=where)
    items = [validate(DockerArchiveItem, item, f"{where}: manifest.json", reading.limits) for item in value]
    item = _chosen(items, where, reading.image)
    return item.config.encode("utf-8", "replace"), [name.encode("utf-8", "replace") for name in item.layers or ()]


def _chosen(items: list[DockerArchiveItem], where: str, asked: str) -> DockerArchiveItem:
    names = [{image_name(tag) for tag in item.repo_tags or ()} for item in items]
    found = [i for i, called in zip(items, names, strict=True) if not asked or fits(asked, called, _config_digest(i))]
    if not found:
        raise not_there(asked, {name for called in names for name in called}, where)
    if len({item.config for item in found}) > 1:
        shown = ", ".join(sorted(show(tag) for item in found for tag in item.repo_tags or ())[:20])
        raise FormatError(
            "platform.ambiguous", f"{where}: {len(found)} images; say with --image which is meant: {shown}",
            where=where, expected="1", actual=len(found),
        )  # fmt: skip
    return found[0]


def _config_digest(item: DockerArchiveItem) -> tuple[str, ...]:
    return tuple(f"sha256:{name}" for name in re.findall(r"[0-9a-f]{64}", item.config))


def _blob(descriptor: Descriptor) -> bytes:
    return descriptor.id.blob_path.encode()


def _need(blobs: Blobs, where: str, name: bytes) -> bytes:
    data = blobs.document(name)
    if data is None:
        raise _missing(where, name)
    return data


def _missing(where: str, name: bytes) -> FormatError:
    return FormatError("archive.missing", f"{where}: {show(name)} is named and not there", where=where)
