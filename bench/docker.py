"""Write ``runtime.docker.tar.gz`` again from the layers in a build's store: the step alone, for timing."""

from __future__ import annotations

import json
from pathlib import Path

from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.image import Image, Layer
from oci_builder.store.blobs import DirStore
from oci_builder.transports.docker_archive import write_docker_archive
from oci_builder.transports.naming import Name


def rewrite(out: Path, cache: Path, target: Path) -> None:
    """Write the archive of the build in ``out``, whose store is in ``cache``, to ``target``."""
    record = json.loads((out / "container.json").read_text())
    layers = tuple(
        Layer(
            Descriptor(media_type=v["media_type"], digest=v["digest"], size=v["size"]), Digest(v["diff_id"]),
            v["tar_size"], {},
        )
        for v in record["layers"]
    )  # fmt: skip
    image = Image({"architecture": "amd64", "os": "linux", "config": {}}, layers)
    with DirStore(cache / "store") as store:
        write_docker_archive(image, Name(record["reference"], record["full_reference"]), store, target)
