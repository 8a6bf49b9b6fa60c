"""A base that stands in an OCI or Docker archive, or an OCI layout: its image's documents and layers, in the store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, Manifest
from oci_builder.model.errors import FormatError, OciBuilderError, read_error
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.jsontext import dump_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.layers import WriteOptions
from oci_builder.store.blobs import DirStore
from oci_builder.transports.opened import ImageFile
from oci_builder.transports.opened_members import OpenOptions
from oci_builder.transports.unchanged import identity
from oci_builder.transports.wanted import Chunks, WantedLayer, index_trail
from oci_builder.wire.compress import BLOCK, Codec, encode_layer, sniff
from oci_builder.wire.verified import VerifiedReader


@dataclass(frozen=True, slots=True)
class BaseArchive:
    """What was brought into the store.

    Attributes:
        config: the config's bytes.
        manifest: the image's layers as they lie in the store.
        digests: of the image's manifest, then of the indexes above it; empty where the archive has no manifest.
        name: what the archive calls the image, or its file name.
        documents: names of the members that tell the archive's form.
    """

    config: bytes
    manifest: Manifest
    digests: tuple[str, ...]
    name: str
    documents: tuple[str, ...]


def bring_archive(
    path: Path, store: DirStore, write: WriteOptions, *, limits: Limits = DEFAULT_LIMITS,
    platform: str = "linux/amd64", image: str = "", emit: Emit = silent, pack: bool = False,
) -> BaseArchive:  # fmt: skip
    """Bring an archive's image into the store. An archive that has not changed is not read again.

    Args:
        image: name or digest of the one that is meant, where there are several.
        pack: compress layers that are plain tars, as Docker saves them; else every blob stays as it is.

    Raises:
        SpecError: ``spec.path``, ``spec.image``, ``spec.digest``.
        FormatError, PolicyError, IntegrityError: what ``verify`` would find in its documents; ``blob.*``.
        TransportError: ``io.*``.
    """
    asked = [identity(path), platform, image, pack, write.codec.describe(), list(astuple(limits))]
    key = hashlib.sha256(b"base archive" + dump_json(asked)).digest()
    cache = None if write.check else write.cache
    known = None if cache is None else _known(cache.record(key), store)
    if known is not None:
        return known
    options = OpenOptions(platform, limits, write.threads, store.work, image=image)
    try:
        found = _read(path, store, options, emit, pack)
    except OSError as error:
        raise read_error(error, f"reading {path.name}") from None
    if write.cache is not None:
        layers = [d.to_json() for d in found.manifest.layers]
        value = {"config": store.put(found.config), "layers": layers}
        write.cache.remember(key, value | {"digests": found.digests, "name": found.name, "documents": found.documents})
    return found


def _known(record: Any, store: DirStore) -> BaseArchive | None:
    try:
        layers = [Descriptor.model_validate(layer) for layer in record["layers"]]
        if not all(store.has(layer.id) for layer in layers):
            return None
        config = store.read(Digest.parse(record["config"]), DEFAULT_LIMITS.document)
        texts = [tuple(str(text) for text in record[name]) for name in ("digests", "documents")]
        return BaseArchive(config, _manifest(config, layers), texts[0], str(record["name"]), texts[1])
    except (TypeError, KeyError, ValueError, OciBuilderError):
        return None


def _manifest(config: bytes, layers: Iterable[Descriptor]) -> Manifest:
    own = Descriptor(media_type=media.OCI_CONFIG, digest=Digest.of(config), size=len(config))
    return Manifest(schema_version=2, config=own, layers=tuple(layers))


def _read(path: Path, store: DirStore, options: OpenOptions, emit: Emit, pack: bool) -> BaseArchive:
    task = f"base {path.name}"
    with ImageFile(path, options) as file:
        emit(Event("start", task))
        layers = []
        for layer, chunks in file.layers():
            layers.append(_bring(layer, chunks, store, options.threads, pack=pack))
            emit(Event("advance", task, layers[-1].size))
        image = file.image or file.found()
        digests: tuple[str, ...] = ()
        if image.manifest is not None:
            digests = (image.manifest.digest, *index_trail(file.parts, image.manifest.id, options.limits))
        emit(Event("done", task))
        name = image.names[0] if image.names else path.name
        documents = tuple(sorted(name for name in file.members if name in ("index.json", "manifest.json")))
        return BaseArchive(image.config, _manifest(image.config, layers), digests, name, documents)


def _bring(layer: WantedLayer, chunks: Chunks, store: DirStore, threads: int, *, pack: bool) -> Descriptor:
    """The layer's descriptor, its blob in the store, held to what its manifest says of it.

    Args:
        pack: compress a plain tar: its diff_id stays.
    """
    head = bytes(next(chunks, b""))
    stream: Iterable[bytes | memoryview] = _after(head, chunks)
    compression = sniff(head)
    if layer.compression not in (None, compression):
        raise FormatError(
            "media.mismatch", f"{layer.name}: declared as {layer.compression}, the bytes are {compression}",
            where=layer.name, expected=layer.compression, actual=compression,
        )  # fmt: skip
    if layer.digest is not None and layer.size is not None:
        stream = VerifiedReader(stream, layer.digest, layer.size, layer.name)
    if pack and compression == "identity":
        with store.ingest("base-layer") as ingest:
            made = encode_layer(_cut(stream), ingest.write, Codec(), threads=threads)
            ingest.commit(made.digest)
        return Descriptor(media_type=media.OCI_LAYER_GZIP, digest=made.digest, size=made.size)
    digest, size = _copy(stream, store)
    return Descriptor(media_type=media.oci_layer(compression), digest=digest, size=size)


def _copy(chunks: Iterable[bytes | memoryview], store: DirStore) -> tuple[Digest, int]:
    hashed, size = hashlib.sha256(), 0
    with store.ingest("base-layer") as ingest:
        for chunk in chunks:
            hashed.update(chunk)
            size += len(chunk)
            ingest.write(chunk)
        return ingest.commit(Digest.from_hex(hashed.hexdigest())), size


def _after(head: bytes, rest: Chunks) -> Chunks:
    yield head
    yield from rest


def _cut(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """The same bytes in blocks: each becomes one member, however they were read."""
    block = bytearray()
    for chunk in chunks:
        block += chunk
        while len(block) >= BLOCK:
            yield bytes(block[:BLOCK])
            del block[:BLOCK]
    if block:
        yield bytes(block)
