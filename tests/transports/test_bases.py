"""A spec's base in an archive that holds no such base: an error that says so, whatever the archive's other view shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError
from oci_builder.model.spec import parse_spec
from oci_builder.rootfs.layers import WriteOptions
from oci_builder.store.blobs import DirStore
from oci_builder.transports import bases
from oci_builder.transports.base_archive import BaseArchive, bring_archive
from tests.lab.archives import Lab, Members, dump, files, write

ATTESTED = [
    {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}},
    {"platform": {"os": "unknown", "architecture": "unknown"}},
]


def code(archive: Path, folder: Path, key: str = "oci") -> str:
    """Of the error that loading this base ends in."""
    text = {"name": "x", "tag": "t", "base": {key: str(archive)}, "prefix": "/opt/rt", "tiers": {"a": {"path": "/x"}}}
    with DirStore(folder / "store") as store, pytest.raises(OciBuilderError) as error:
        bases.load_base(parse_spec(json.dumps(text).encode()), folder, store, WriteOptions(threads=1))
    return error.value.code


def marked(mark: dict[str, object], shown: Lab) -> Members:
    """An archive whose only OCI image is marked as what it is not, beside the documents and layers of another image."""
    members = Lab(layers=[files(evil=b"x")]).oci()
    index = json.loads(members["index.json"])
    index["manifests"] = [index["manifests"][0] | mark]
    other = {name: data for name, data in shown.oci().items() if name.startswith("blobs/") or name == "manifest.json"}
    return members | other | {"index.json": dump(index)}


@pytest.mark.parametrize("key", ["oci", "docker"])
@pytest.mark.parametrize("mark", ATTESTED, ids=["annotation", "platform"])
def test_b086_a_marked_image_beside_another_is_no_base(mark: dict[str, object], key: str, tmp_path: Path) -> None:
    """B086: what only claims to be an attestation; this was a traceback."""
    archive = write(tmp_path / "a.tar", marked(mark, Lab()))
    assert code(archive, tmp_path, key) in {"archive.views", "archive.images", "media.mismatch"}


@pytest.mark.parametrize("key", ["oci", "docker"])
def test_an_index_without_images_beside_a_docker_view_is_no_base(key: str, tmp_path: Path) -> None:
    members = Lab().oci()
    empty = dump(json.loads(members["index.json"]) | {"manifests": []})
    archive = write(tmp_path / "a.tar", members | {"index.json": empty})
    assert code(archive, tmp_path, key) in {"archive.views", "archive.images"}


def test_a_base_that_was_remembered_without_a_manifest_is_no_oci_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier version remembered of an archive, when the two views were not compared."""

    def remembered(*args: object, **options: object) -> BaseArchive:
        found = bring_archive(*args, **options)  # type: ignore[arg-type]
        return BaseArchive(found.config, found.manifest, (), found.name, found.documents)

    monkeypatch.setattr(bases, "bring_archive", remembered)
    assert code(write(tmp_path / "a.tar", Lab().oci()), tmp_path) == "archive.images"
