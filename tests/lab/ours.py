"""A small image written by our own writers: a base layer of another gzip, and layers of ours."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.image import Image, Layer
from oci_builder.store.blobs import DirStore
from oci_builder.transports.docker_archive import write_docker_archive
from oci_builder.transports.naming import Name
from oci_builder.transports.oci_archive import write_oci_archive
from oci_builder.wire.compress import Codec, encode_layer
from oci_builder.wire.tar import END_OF_ARCHIVE, Kind, TarEntry, encode_header, padding
from tests.lab.archives import entry, tar

NAME = Name("lab/image:r1", "docker.io/lab/image:r1")


def base_layer(store: DirStore) -> Layer:
    """As a base brings it: one gzip member with a file name and a time in its header."""
    data = tar(entry("etc", type=b"5", mode=0o755, mtime=1), entry("etc/os-release", b"NAME=lab\n", uname="root"))
    blob = gzip.compress(data, 6, mtime=1_700_000_000)
    descriptor = Descriptor(media_type=media.OCI_LAYER_GZIP, digest=store.put(blob), size=len(blob))
    return Layer(descriptor, Digest.of(data), len(data), {"created_by": "/bin/sh -c #(nop) ADD file"})


def our_layer(store: DirStore, name: str, sizes: tuple[int, ...]) -> Layer:
    """As our layer writer makes it: blocks of whole entries, the end marker alone at the end."""
    rnd, blocks = random.Random(name), []
    for n, size in enumerate(sizes):
        data = rnd.choice((rnd.randbytes(size), b"text of a file\n" * (size // 15 + 1)))[:size]
        head = encode_header(TarEntry(name=f"opt/{name}/{n}".encode(), kind=Kind.FILE, size=size))
        blocks.append(head + data + padding(size))
    out: list[bytes] = []
    made = encode_layer([*blocks, END_OF_ARCHIVE], out.append, Codec(), 2)
    store.put(b"".join(out))
    descriptor = Descriptor(media_type=media.OCI_LAYER_GZIP, digest=made.digest, size=made.size)
    return Layer(descriptor, made.diff_id, made.tar_size, {"created_by": f"oci-builder: {name}"}, name)


def our_image(store: DirStore, **settings: Any) -> Image:
    """An image with a base layer, two of ours, and one of them again."""
    one, two = our_layer(store, "one", (3000, 70_000, 10)), our_layer(store, "two", (900_000, 1))
    config = {"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/usr/bin"]}, **settings}
    return Image(config, (base_layer(store), one, two, one))


def write_pair(folder: Path, image: Image, store: DirStore) -> tuple[Path, Path]:
    """Both archives of an image."""
    oci, docker = folder / "runtime.oci.tar", folder / "runtime.docker.tar.gz"
    write_oci_archive(image, NAME, store, oci)
    write_docker_archive(image, NAME, store, docker)
    return oci, docker
