"""A refusal says what the bytes are, where that can be known, and what to do with them instead."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError
from oci_builder.unpack import unpack_image
from oci_builder.verify import verify_archives
from tests.lab.archives import Lab, dump, files, with_, write
from tests.lab.tarlang import END, file, folder, hardlink, tar

ENCRYPTED = "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"


def packed_twice(path: Path) -> Path:
    whole = write(path / "a.tar", Lab().oci(), compress=True)
    whole.write_bytes(gzip.compress(whole.read_bytes()))
    return whole


def raw(data: bytes) -> Callable[[Path], Path]:
    def build(path: Path) -> Path:
        (path / "raw.tar").write_bytes(data)
        return path / "raw.tar"

    return build


def dir_folder(document: dict[str, object]) -> Callable[[Path], Path]:
    def build(path: Path) -> Path:
        (path / "dir").mkdir()
        (path / "dir/version").write_text("Directory Transport Version: 1.1")
        (path / "dir/manifest.json").write_bytes(dump(document))
        return path / "dir"

    return build


TREE = tar(folder(b"etc"), file(b"etc/passwd", b"x"), hardlink(b"etc/p", b"etc/passwd"))
HINTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "C10-09c: gzip of gzip": (packed_twice, "gzip data: decompress"),
    "C9-08: a layer packed twice": (lambda path: write(path / "a.tar", Lab(
        layers=[gzip.compress(files(a=random.Random(1).randbytes(2000)))]).oci()), "gzip data: decompress"),
    "B044: docker export": (raw(TREE), '{"rootfs": PATH}'),
    "B044: crane export": (raw(tar(file(b"usr/bin/x"))), '{"rootfs": PATH}'),
    "B044: cpio": (raw(b"070701" + bytes(506) + END), "cpio data"),
    "C3-13: an encrypted layer": (lambda path: write(path / "a.tar", Lab(edit_manifest=with_(
        layers__0__mediaType=ENCRYPTED)).oci()), "decrypt the image first"),
    "C10-01: a list of dir:": (dir_folder({"schemaVersion": 2, "manifests": []}), "copy that to oci:"),
    "B083: schema 1 of dir:": (dir_folder({"schemaVersion": 1, "fsLayers": []}), "copy that to oci:"),
}  # fmt: skip


@pytest.mark.parametrize("name", HINTS)
def test_verify_and_unpack_say_what_it_is(name: str, tmp_path: Path) -> None:
    build, hint = HINTS[name]
    archive = build(tmp_path)
    report = verify_archives([archive])
    assert any(hint in finding.message for finding in report.errors), json.dumps(report.to_json(), indent=1)
    with pytest.raises(OciBuilderError) as error:
        unpack_image(archive, tmp_path / "out")
    assert hint in error.value.message
