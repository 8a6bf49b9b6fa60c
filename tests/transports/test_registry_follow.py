"""Proving a layer while it comes gives what proving it afterwards gives, or nothing."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import IntegrityError
from oci_builder.store.blobs import DirStore
from oci_builder.transports.registry_blobs import fetch_blob
from tests.lab.images import layer_tar
from tests.lab.registry import Fault, Registry, Reply, drop_after, on
from tests.transports.registry_case import client_of

TAR = layer_tar("file", bytes(range(256)) * 20_000)
BLOB = gzip.compress(TAR, 0, mtime=0)
FOUND = {"diff_id": Digest.of(TAR), "tar_size": len(TAR)}


def followed(root: Path, blob: bytes, *faults: Fault, kind: str = media.OCI_LAYER_GZIP) -> object:
    """What the store remembers of a layer that was fetched."""
    layer = Descriptor(media_type=kind, digest=Digest.of(blob), size=len(blob))
    with Registry() as registry, DirStore(root) as store, client_of(registry, None) as client:
        registry.put_blob(blob)
        registry.faults = list(faults)
        fetch_blob(client, layer, store, follow=True)
        return store.recall(layer.id, "tar")


def test_what_is_found_is_remembered(tmp_path: Path) -> None:
    assert followed(tmp_path / "gzip", BLOB) == FOUND
    assert followed(tmp_path / "plain", TAR, kind=media.OCI_LAYER) == FOUND


def test_it_goes_on_over_drops(tmp_path: Path) -> None:
    assert followed(tmp_path, BLOB, on("GET", "blobs", drop_after(2_000_000), times=2)) == FOUND


def test_a_download_that_begins_again_is_not_believed(tmp_path: Path) -> None:
    ignore_ranges = on("GET", "blobs", lambda _q, _r: Reply(200, BLOB))
    assert followed(tmp_path, BLOB, ignore_ranges, on("GET", "blobs", drop_after(2_000_000), times=1)) is None


@pytest.mark.parametrize("blob", [BLOB[:-9], b"no gzip at all", b"\x1f\x8b\x08broken"])
def test_what_cannot_be_decompressed_is_left_to_the_proof(tmp_path: Path, blob: bytes) -> None:
    assert followed(tmp_path, blob) is None


def test_a_type_that_is_no_layer_is_not_followed(tmp_path: Path) -> None:
    assert followed(tmp_path, BLOB, kind="application/octet-stream") is None


def test_wrong_bytes_are_not_remembered(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError):
        followed(tmp_path, BLOB, on("GET", "blobs", lambda _q, _r: Reply(200, BLOB[:-1] + b"!")))
    with DirStore(tmp_path) as store:
        assert store.recall(Digest.of(BLOB), "tar") is None
