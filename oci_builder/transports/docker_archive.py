"""``runtime.docker.tar.gz``: the same image with uncompressed layers, written without compressing a layer again.

gzip members may be concatenated (RFC 1952, section 2.2) and tar members are 512-byte aligned, so a gzip layer is
embedded unchanged: a small member with the tar header before it, another with the padding after it. What the archive
inflates to is an OCI layout whose layers are plain tars, plus ``manifest.json``.
"""

from __future__ import annotations

from pathlib import Path

from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Image, Layer
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.store.blobs import DirStore
from oci_builder.transports.filewriter import ArchiveRecord, FileWriter, folder_header, member_header, small_member
from oci_builder.transports.naming import LAYOUT, Name, docker_manifest_bytes, index_bytes, unique
from oci_builder.wire.compress import BLOCK as MEMBER
from oci_builder.wire.compress import Codec, decode, store_bytes
from oci_builder.wire.tar import BLOCK, END_OF_ARCHIVE


def write_docker_archive(
    image: Image, name: Name, store: DirStore, path: Path, emit: Emit = silent, limits: Limits = DEFAULT_LIMITS
) -> ArchiveRecord:
    """Write the archive from blobs in the store. Only layers that are no clean gzip (a base's) are compressed for it.

    Raises:
        IntegrityError: ``blob.*`` when the store has lost a layer.
        TransportError: ``io.*``.
    """
    tars = [layer.tar_descriptor for layer in image.layers]
    manifest = image.manifest_descriptor(uncompressed=True)
    task = f"write {path.name}"
    emit(Event("start", task, total=sum(layer.size for layer in unique([x.descriptor for x in image.layers]))))
    pending = (
        small_member("oci-layout", LAYOUT)
        + small_member("index.json", index_bytes(image, name, uncompressed=True))
        + small_member("manifest.json", docker_manifest_bytes(image, name, tars))
        + folder_header("blobs")
        + folder_header("blobs/sha256")
        + small_member(manifest.id.blob_path, image.manifest_bytes(uncompressed=True))
        + small_member(image.config_descriptor.id.blob_path, image.config_bytes)
    )
    with FileWriter(path, emit) as out:
        for layer in {layer.diff_id: layer for layer in image.layers}.values():
            out.write(store_bytes(pending + member_header(layer.diff_id.blob_path, layer.tar_size)))
            _embed(layer, store, out, limits)
            pending = bytes(-layer.tar_size % BLOCK)
        out.write(store_bytes(pending + END_OF_ARCHIVE))
        record = out.close()
    emit(Event("done", task))
    return record


def _embed(layer: Layer, store: DirStore, out: FileWriter, limits: Limits) -> None:
    blob = store.open(layer.descriptor.id)
    # NULs behind a base's last gzip member would stand between members here, where readers stop at them.
    padded = (store.recall(layer.descriptor.id, "tar") or {}).get("padded")
    if layer.compression == "gzip" and not padded:
        out.copy(blob)
        return
    codec = Codec()
    where = f"layer {layer.descriptor.digest}"
    for chunk in decode(blob, layer.compression, limits=limits, where=where):  # type: ignore[arg-type]
        for at in range(0, len(chunk), MEMBER):
            out.write(codec.compress(chunk[at : at + MEMBER]))
