"""``runtime.oci.tar``: an OCI layout in a tar, with a ``manifest.json`` so that Docker reads it too."""

from __future__ import annotations

from pathlib import Path

from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Image
from oci_builder.store.blobs import DirStore
from oci_builder.transports.filewriter import ArchiveRecord, FileWriter, folder_header, member_header, small_member
from oci_builder.transports.naming import LAYOUT, Name, docker_manifest_bytes, index_bytes, unique
from oci_builder.wire.tar import BLOCK, END_OF_ARCHIVE


def write_oci_archive(image: Image, name: Name, store: DirStore, path: Path, emit: Emit = silent) -> ArchiveRecord:
    """Write the archive from blobs in the store. Documents come first, so that a stream can be judged as it comes.

    Raises:
        IntegrityError: ``blob.*`` when the store has lost a layer.
        TransportError: ``io.*``.
    """
    layers = [layer.descriptor for layer in image.layers]
    task = f"write {path.name}"
    emit(Event("start", task, total=sum(layer.size for layer in unique(layers))))
    with FileWriter(path, emit) as out:
        out.write(
            small_member("oci-layout", LAYOUT)
            + small_member("index.json", index_bytes(image, name))
            + small_member("manifest.json", docker_manifest_bytes(image, name, layers))
            + folder_header("blobs")
            + folder_header("blobs/sha256")
            + small_member(image.manifest_descriptor().id.blob_path, image.manifest_bytes())
            + small_member(image.config_descriptor.id.blob_path, image.config_bytes)
        )
        for layer in unique(layers):
            out.write(member_header(layer.id.blob_path, layer.size))
            out.copy(store.open(layer.id))
            out.write(bytes(-layer.size % BLOCK))
        out.write(END_OF_ARCHIVE)
        record = out.close()
    emit(Event("done", task))
    return record
