"""What stands in an index beside the image: other platforms, attestations, referrers, second images."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.model.errors import OciBuilderError
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.verify import VerifyOptions, verify_archives
from tests.lab import tarlang as t
from tests.lab.archives import OCI, Lab, Members, descriptor, dump, files, sha, with_, write

MARKS = {
    "annotation": {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}},
    "platform": {"platform": {"os": "unknown", "architecture": "unknown"}},
}
FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"


def put(members: Members, *manifests: dict[str, object]) -> Members:
    """The members with more in their index."""
    index = json.loads(members["index.json"])
    return members | {"index.json": dump(index | {"manifests": [*index["manifests"], *manifests]})}


def blobs(*data: bytes) -> Members:
    return {"blobs/sha256/" + sha(one): one for one in data}


def referrer(config: str, layer: str, config_data: bytes = b"{}", **more: object) -> Callable[[Members], Members]:
    """Add a manifest that refers to the image."""

    def edit(members: Members) -> Members:
        image = json.loads(members["index.json"])["manifests"][0]
        manifest = dump({
            "schemaVersion": 2, "mediaType": OCI + "manifest.v1+json", "config": descriptor(config, config_data),
            "layers": [descriptor(layer, b"evidence")],
        } | ({"subject": {k: image[k] for k in ("mediaType", "digest", "size")}} if more else {}) | more)  # fmt: skip
        members = members | blobs(manifest, b"evidence", config_data)
        return put(members, descriptor(OCI + "manifest.v1+json", manifest))

    return edit


def other(platform: dict[str, str], **fields: object) -> Callable[[Members], Members]:
    """Add another image's documents, and its layers where ``keep`` is true."""
    keep = fields.pop("keep", True)
    lab = Lab(layers=[files(other=b"o")], platform=(platform["os"], platform["architecture"]))
    second = replace(lab, **fields).oci()  # type: ignore[arg-type]
    found = {k: v for k, v in second.items() if k.startswith("blobs/") and (keep or v[:1] == b"{")}
    top = json.loads(second["index.json"])["manifests"][0] | {"platform": platform}
    return lambda members: put(members | found, top)


def accepted(path: Path, platform: str = "linux/amd64") -> None:
    report = verify_archives([path], VerifyOptions(platform=platform))
    assert report.ok, report.errors
    unpack_image(path, path.with_name("out"), UnpackOptions(platform))


def refused(path: Path) -> set[str]:
    found = {finding.code for finding in verify_archives([path]).errors}
    with pytest.raises(OciBuilderError) as error:
        unpack_image(path, path.with_name("out"))
    assert error.value.code in found
    spec = path.with_name("spec.json")
    (path.parent / "tier").mkdir()
    spec.write_text(json.dumps({
        "name": "l", "tag": "t", "base": {"oci": path.name}, "prefix": "/opt", "tiers": {"one": {"path": "tier"}}}))
    with pytest.raises(OciBuilderError):
        build(spec, path.with_name("built"), BuildOptions(path.with_name("cache"), 1))
    return found


HOSTILE = Lab(layers=[t.tar(t.file(b"../../x", b"1"))])


@pytest.mark.parametrize("mark", MARKS)
def test_an_image_that_is_marked_as_an_attestation_is_judged_and_is_no_image(mark: str, tmp_path: Path) -> None:
    """B086, B087: clients that do not know the mark run it."""
    lab = replace(HOSTILE, edit_descriptor=lambda d: d | MARKS[mark])
    members = {k: v for k, v in lab.oci().items() if k != "manifest.json"}
    assert "path.escape" in refused(write(tmp_path / "a.tar", members))


@pytest.mark.parametrize("mark", MARKS)
def test_a_good_image_alone_so_marked_is_no_image(mark: str, tmp_path: Path) -> None:
    lab = Lab(edit_descriptor=lambda d: d | MARKS[mark])
    members = {k: v for k, v in lab.oci().items() if k != "manifest.json"}
    assert refused(write(tmp_path / "a.tar", members)) & {"archive.images", "config.platform"}


@pytest.mark.parametrize("mark", MARKS)
def test_the_docker_view_shows_nothing_that_the_index_only_has_marked(mark: str, tmp_path: Path) -> None:
    good = Lab()
    hidden = Lab(layers=[files(z=b"other")], edit_descriptor=lambda d: d | MARKS[mark]).oci()
    members = good.oci() | hidden | {"manifest.json": good.oci()["manifest.json"]}
    assert "archive.views" in refused(write(tmp_path / "a.tar", members))


@pytest.mark.parametrize("edit", [
    referrer("application/vnd.oci.empty.v1+json", "application/vnd.cyclonedx+json",
             artifactType="application/vnd.cyclonedx+json"),
    referrer(OCI + "config.v1+json", "application/vnd.dev.cosign.simplesigning.v1+json",
             b'{"architecture":"","os":"","rootfs":{"type":"layers","diff_ids":[]}}'),
], ids=["bill", "cosign"])  # fmt: skip
def test_a_layout_with_referrers_is_accepted(edit: Callable[[Members], Members], tmp_path: Path) -> None:
    accepted(write(tmp_path / "a.tar", Lab(edit_members=edit).oci()))


def test_a_referrers_blob_is_held_to_its_digest(tmp_path: Path) -> None:
    edit = referrer("application/vnd.oci.empty.v1+json", "text/spdx", artifactType="text/spdx")
    members = Lab(edit_members=edit).oci()
    members["blobs/sha256/" + sha(b"evidence")] = b"Evidence"
    assert "blob.digest" in {f.code for f in verify_archives([write(tmp_path / "a.tar", members)]).errors}


@pytest.mark.parametrize("edit", [
    other({"os": "windows", "architecture": "amd64"}, edit_manifest=with_(layers__0__mediaType=FOREIGN)),
    other({"os": "linux", "architecture": "arm64"}, keep=False),
], ids=["foreign layers", "layers left out"])  # fmt: skip
def test_what_other_platforms_lack_is_a_warning(edit: Callable[[Members], Members], tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", Lab(edit_members=edit).oci())
    accepted(path)
    assert {f.code for f in verify_archives([path]).findings} & {"media.foreign", "archive.missing"}


@pytest.mark.parametrize("what", ["config", "layers__0"])
def test_c3_20_other_places_of_a_blob_are_a_warning(what: str, tmp_path: Path) -> None:
    """We never fetch from them; skopeo and podman do, whatever the blob is."""
    edit = with_(**{f"{what}__urls": ["http://169.254.169.254/x"]})
    report = verify_archives([write(tmp_path / "a.tar", Lab(edit_manifest=edit).oci())])
    assert report.ok and [f.actual for f in report.findings if f.code == "media.foreign"] == ["'http://169.254.169.254/x'"]


@pytest.mark.parametrize("layers", [
    [t.tar(t.file(b"d"), t.file(b"d/x"))], [t.tar(t.file(b"d")), t.tar(t.file(b"d/x"), t.file(b"d/y"))],
], ids=["of its layer", "of a lower one"])  # fmt: skip
def test_c5_11_a_parent_that_is_a_file_is_a_warning(layers: list[bytes], tmp_path: Path) -> None:
    """Unpacking says so too. Docker and umoci 0.4 refuse it."""
    path = write(tmp_path / "a.tar", Lab(layers=layers).oci())
    assert [f.severity for f in verify_archives([path]).findings if f.code == "entry.parent"] == ["warning"] * 2
    assert [f.code for f in unpack_image(path, tmp_path / "root").warnings] == ["entry.parent"]


def test_the_platform_that_is_asked_for_may_lack_nothing(tmp_path: Path) -> None:
    edit = other({"os": "linux", "architecture": "arm64"}, keep=False)
    path = write(tmp_path / "a.tar", Lab(edit_members=edit).oci())
    report = verify_archives([path], VerifyOptions(platform="linux/arm64"))
    assert {f.code for f in report.errors} == {"archive.missing"}


def test_arm_is_not_taken_for_arm64(tmp_path: Path) -> None:
    lab = Lab(platform=("linux", "arm64"), edit_members=other({"os": "linux", "architecture": "arm"}, keep=False))
    accepted(write(tmp_path / "a.tar", lab.oci()), "linux/arm64")


def test_two_images_with_names_of_their_own_are_both_judged(tmp_path: Path) -> None:
    """As Docker 28 saves two; C3-16 stays an error where one name stands for both."""
    first, second = Lab(name="lab/a:1"), Lab(name="lab/b:1", layers=[files(b=b"2")])
    one, two = first.oci(), second.oci()
    members = put(one | two | {"index.json": one["index.json"]}, *json.loads(two["index.json"])["manifests"])
    members["manifest.json"] = dump(json.loads(one["manifest.json"]) + json.loads(two["manifest.json"]))
    report = verify_archives([write(tmp_path / "a.tar", members)])
    assert report.ok and "platform.ambiguous" in {f.code for f in report.findings}
