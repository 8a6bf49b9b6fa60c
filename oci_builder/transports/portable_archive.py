"""``runtime.tar.gz``: our layers' gzip members again, without the base, with one end marker.

A layer's end-of-archive blocks are a member of their own, so leaving that member out joins layers into one tar; nothing
is compressed twice, and a store that finds equal chunks keeps the three archives about once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from oci_builder.model.errors import IntegrityError
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Layer
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.store.blobs import DirStore
from oci_builder.transports.filewriter import ArchiveRecord, FileWriter
from oci_builder.wire.compress import BLOCK, Codec, compress_bytes, decode, encode_layer, gzip_members
from oci_builder.wire.tar import END_OF_ARCHIVE


def write_portable_archive(
    layers: Sequence[Layer],
    own: bytes,
    store: DirStore,
    path: Path,
    emit: Emit = silent,
    limits: Limits = DEFAULT_LIMITS,
) -> ArchiveRecord:
    """Write the archive.

    Args:
        layers: ours, in the image's order; each ends in an end marker.
        own: tar entries (headers, content, padding) that only this archive has; they come first.

    Raises:
        IntegrityError: ``blob.*``; ``layer.marker`` when a layer does not end in a marker of its own.
        TransportError: ``io.*``.
    """
    task = f"write {path.name}"
    emit(Event("start", task, total=sum(layer.descriptor.size for layer in layers)))
    with FileWriter(path, emit) as out:
        if own:
            out.write(compress_bytes(own))
        for layer in layers:
            if layer.compression == "gzip":
                out.copy(store.open(layer.descriptor.id), 0, marker_offset(layer, store))
            else:
                blocks = _without_marker(layer, store, limits)
                encode_layer(blocks, out.write, Codec(), threads=2)
        out.write(compress_bytes(END_OF_ARCHIVE))
        record = out.close()
    emit(Event("done", task))
    return record


def marker_offset(layer: Layer, store: DirStore) -> int:
    """Where the last member of a gzip layer begins: the end marker.

    Raises:
        IntegrityError: ``layer.marker``.
    """
    where = f"layer {layer.name}"
    last = None
    for last in gzip_members(store.open(layer.descriptor.id), where):  # noqa: B007
        pass
    if last is None or last.tar_size != len(END_OF_ARCHIVE):
        raise IntegrityError("layer.marker", f"{where}: does not end in an end marker of its own", where=where)
    return last.blob_offset


def _without_marker(layer: Layer, store: DirStore, limits: Limits) -> Iterator[bytes]:
    left = layer.tar_size - len(END_OF_ARCHIVE)
    blob = store.open(layer.descriptor.id)
    for chunk in decode(blob, layer.compression, limits=limits, where=f"layer {layer.name}"):  # type: ignore[arg-type]
        part = chunk[:left]
        left -= len(part)
        for at in range(0, len(part), BLOCK):
            yield bytes(part[at : at + BLOCK])
