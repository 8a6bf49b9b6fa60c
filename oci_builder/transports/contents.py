"""What an image's layers hold, read in one pass over an archive: for ``inspect`` and ``diff``, which keep no bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, DockerArchiveItem, ImageConfig, parse_document, validate
from oci_builder.model.errors import FormatError, SpecError, disk_error, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.transports.resolve import resolve_manifest
from oci_builder.transports.wanted import link_target
from oci_builder.wire.compress import Options, decode_chunks, sniff
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import Kind, TarEntry, TarReader

_TIER = re.compile(rb"(?:.*/)?envs/([^/]+)(?:/|\Z)")
_LAYER_NAME = re.compile(r"oci-builder: (.*)\Z")


@dataclass(slots=True)
class Item:
    """An entry of a layer; ``value`` is equal for entries with equal metadata and content."""

    path: bytes
    kind: str
    size: int
    link: bytes
    value: tuple[Any, ...]


@dataclass(slots=True)
class LayerContents:
    """One layer and its entries by path."""

    digest: str
    media_type: str
    size: int
    diff_id: str
    tar_size: int
    entries: dict[bytes, Item]
    name: str = ""


@dataclass(slots=True)
class ImageContents:
    """One image: layers, lowest first, and settings of its config."""

    about: dict[str, Any]
    settings: dict[str, Any]
    layers: list[LayerContents] = field(default_factory=list)

    def tier_of(self, path: bytes) -> str:
        """The tier whose environment a path is in, or ``""``."""
        match = _TIER.match(path)
        return match.group(1).decode("utf-8", "replace") if match else ""

    def tree(self) -> dict[bytes, Item]:
        """The final tree: upper layers win, whiteouts hide what is below (image-spec layer.md)."""
        tree: dict[bytes, Item] = {}
        for layer in self.layers:
            _apply(tree, layer.entries)
        return tree


def _apply(tree: dict[bytes, Item], entries: dict[bytes, Item]) -> None:
    for path in entries:
        folder, _, name = path.rpartition(b"/")
        if name.startswith(b".wh."):
            opaque = name == b".wh..wh..opq"
            hidden = folder if opaque else (folder + b"/" + name[4:] if folder else name[4:])
            inside = hidden + b"/" if hidden else b""
            for gone in [p for p in tree if p.startswith(inside) or (p == hidden and not opaque)]:
                del tree[gone]
    for path, item in entries.items():
        if path.rpartition(b"/")[2].startswith(b".wh."):
            continue
        target = entries.get(item.link, tree.get(item.link)) if item.kind == "hardlink" else None
        tree[path] = target or item


def read_contents(
    path: Path,
    *,
    platform: str = "linux/amd64",
    limits: Limits = DEFAULT_LIMITS,
    emit: Emit = silent,
    hashes: bool = False,
) -> ImageContents:
    """Read an OCI archive or layout, or a Docker archive, compressed outside or not.

    Args:
        hashes: hash each file's content, so that ``Item.value`` compares it.

    Raises:
        SpecError: ``spec.path``. FormatError, PolicyError, IntegrityError: what is wrong with the archive.
        TransportError: ``io.*``.
    """
    scan = _Scan(limits, hashes)
    task = f"read {path.name}"
    try:
        if path.is_dir():
            for name, file in _layout_files(path):
                with open(file, "rb", buffering=0) as opened:
                    scan.member(name, FileRange(opened.fileno(), 0, file.stat().st_size).chunks())
        elif path.is_file():
            with open(path, "rb", buffering=0) as opened:
                emit(Event("start", task, total=path.stat().st_size))
                source = FileRange(opened.fileno(), 0, path.stat().st_size)
                scan.archive(_counted(source.chunks(), emit, task), str(path))
                emit(Event("done", task))
        elif path.exists():
            raise SpecError("spec.path", f"{show(str(path))} is neither a file nor a folder", where=str(path))
        else:
            raise SpecError("spec.path", f"no such archive: {show(str(path))}", where=str(path))
    except OSError as error:
        raise disk_error(error, f"reading {path.name}") from None
    return scan.image(path, platform)


def _layout_files(path: Path) -> Iterator[tuple[str, Path]]:
    for name in ("oci-layout", "index.json", "manifest.json"):
        if (path / name).is_file():
            yield name, path / name
    for file in sorted((path / "blobs" / "sha256").glob("*")):
        if file.is_file() and not file.is_symlink():
            yield f"blobs/sha256/{file.name}", file


def _counted(chunks: Iterable[bytes], emit: Emit, task: str) -> Iterator[bytes]:
    for chunk in chunks:
        emit(Event("advance", task, len(chunk)))
        yield chunk


class _Scan:
    """Members as they come: small ones are kept as possible documents, all are read as layers if they are tars."""

    def __init__(self, limits: Limits, hashes: bool) -> None:
        self.limits, self.hashes = limits, hashes
        self.documents: dict[str, bytes] = {}
        self.layers: dict[str, LayerContents] = {}
        self.links: dict[str, str] = {}

    def archive(self, chunks: Iterator[bytes], where: str) -> None:
        head = next(chunks, b"")
        stream: Iterator[bytes | memoryview] = _chain(head, chunks)
        compression = sniff(head)
        if compression != "identity":
            stream = decode_chunks(stream, compression, Options(self.limits, where, 2))
        reader = TarReader(stream, limits=self.limits, where=where)
        for entry in reader:
            name = entry.name.decode("utf-8", "backslashreplace")
            if entry.kind is Kind.FILE:
                self.member(name, reader.data())
            elif entry.kind is Kind.SYMLINK:
                self.links[name] = link_target(name, entry.link)

    def member(self, name: str, chunks: Iterator[bytes | memoryview]) -> None:
        kept: list[bytes] = []
        size = 0
        for chunk in chunks:
            kept.append(bytes(chunk))
            size += len(chunk)
            if size > self.limits.document:
                break
        head = b"".join(kept)
        if size <= self.limits.document:
            self.documents[name] = head
        if head[:1] not in (b"{", b"[") and size >= 20:
            self._layer(name, head, chunks)

    def _layer(self, name: str, head: bytes, rest: Iterator[bytes | memoryview]) -> None:
        blob, tar = hashlib.sha256(), hashlib.sha256()
        sizes = [0, 0]

        def hashed(chunks: Iterator[bytes | memoryview], into: Any, which: int) -> Iterator[bytes | memoryview]:
            for chunk in chunks:
                into.update(chunk)
                sizes[which] += len(chunk)
                yield chunk

        compression = sniff(head)
        stream = hashed(_chain(head, rest), blob, 0)
        plain = decode_chunks(stream, compression, Options(self.limits, name, 2))
        reader = TarReader(hashed(plain, tar, 1), limits=self.limits, where=name)
        entries = {entry.name: self._item(entry, reader) for entry in reader}
        self.layers[name] = LayerContents(
            Digest.from_hex(blob.hexdigest()), media.oci_layer(compression), sizes[0], Digest.from_hex(tar.hexdigest()),
            sizes[1], entries,
        )  # fmt: skip

    def _item(self, entry: TarEntry, reader: TarReader) -> Item:
        content = b""
        if self.hashes and entry.kind is Kind.FILE:
            hashed = hashlib.sha256()
            for part in reader.data():
                hashed.update(part)
            content = hashed.digest()
        value = (
            entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.link, entry.major, entry.minor,
            tuple(sorted(entry.xattrs.items())), entry.size, content,
        )  # fmt: skip
        return Item(entry.name, str(entry.kind), entry.size, entry.link, value)

    def image(self, path: Path, platform: str) -> ImageContents:
        """Put the members together as the documents say."""
        if "index.json" in self.documents:
            return self._oci(path, platform)
        if "manifest.json" in self.documents:
            return self._docker(path)
        raise FormatError(
            "archive.missing", f"{path.name}: neither index.json nor manifest.json: this is no image", where=str(path)
        )

    def _document(self, name: str, path: Path) -> bytes:
        found = self.documents.get(self.links.get(name, name))
        if found is None:
            raise FormatError("archive.missing", f"{path.name}: no member {show(name)}", where=str(path))
        return found

    def _oci(self, path: Path, platform: str) -> ImageContents:
        index = self.documents["index.json"]

        def read(descriptor: Descriptor) -> bytes:
            own = descriptor.id == Digest.of(index)
            return index if own else self._document(descriptor.id.blob_path, path)

        root = Descriptor(media_type=media.OCI_INDEX, digest=Digest.of(index), size=len(index))
        found = resolve_manifest(root, read, platform, self.limits)
        names = [layer.id.blob_path for layer in found.manifest.layers]
        config = found.manifest.config.id
        notes = found.descriptor.annotations or {}
        tags = [notes[k] for k in ("org.opencontainers.image.ref.name",) if k in notes]
        return self._assemble(path, config.blob_path, names, tags, found.descriptor.digest)

    def _docker(self, path: Path) -> ImageContents:
        value = load_json(self.documents["manifest.json"], "manifest.json", self.limits)
        if not isinstance(value, list) or not value:
            raise FormatError("archive.manifest", f"{path.name}: manifest.json names no image", where=str(path))
        item = validate(DockerArchiveItem, value[0], "manifest.json", self.limits)
        return self._assemble(path, item.config, list(item.layers or ()), list(item.repo_tags or ()), "")

    def _assemble(self, path: Path, config: str, names: list[str], tags: list[str], manifest: str) -> ImageContents:
        data = self._document(config, path)
        parsed = parse_document(ImageConfig, data, "config", self.limits)
        histories = [h for h in parsed.history or () if not h.empty_layer]
        about = {
            "path": str(path), "tags": tags, "manifest": manifest, "config": Digest.of(data),
            "platform": f"{parsed.os}/{parsed.architecture}",
        }  # fmt: skip
        out = ImageContents(about, load_json(data, "config", self.limits))
        for number, name in enumerate(names):
            layer = self.layers.get(self.links.get(name, name))
            if layer is None:
                raise FormatError("archive.missing", f"{path.name}: no layer {show(name)}", where=str(path))
            if len(histories) == len(names):
                match = _LAYER_NAME.match(histories[number].created_by or "")
                layer.name = match.group(1).replace(" and ", "+") if match else layer.name
            out.layers.append(layer)
        return out


def _chain(head: bytes | memoryview, rest: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    yield head
    yield from rest
