"""Evidence attached to an image in a registry: artifacts, and where they are listed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import (
    FormatError,
    IntegrityError,
    PolicyError,
)
from oci_builder.release.attach import attach
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_artifacts import ArtifactRegistry
from oci_builder.transports.registry_reference import Reference
from tests.lab.images import small_image
from tests.lab.registry import Registry, Reply, Request
from tests.transports.registry_case import OPTIONS, RECEIPT, REPO, SBOM


@pytest.mark.parametrize("api", [True, False])
def test_referrers_by_api_and_by_fallback_tag(tmp_path: Path, api: bool) -> None:
    image = small_image()
    subject = Descriptor(media_type=media.OCI_MANIFEST, digest=image.digest, size=len(image.manifest))
    with Registry() as registry:
        registry.referrers_api = api
        image.publish(registry, REPO)
        with RegistryClient(Reference(registry.host, REPO), OPTIONS, "pull,push") as client:
            artifacts = ArtifactRegistry(client)
            pushed = attach(artifacts, subject, [SBOM, RECEIPT])
            assert attach(artifacts, subject, [SBOM, RECEIPT]) == pushed
            listed = artifacts.referrers(subject.id)
            assert {d.artifact_type for d in listed} == {SBOM.artifact_type, RECEIPT.artifact_type}
            assert len(listed) == 2
            assert artifacts.pull_artifact(pushed[1]) == RECEIPT.files
        assert ((REPO, f"sha256-{image.digest.hex}") in registry.manifests) is not api


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[tuple[Registry, ArtifactRegistry, Descriptor]]:
    """An image in a registry, and what attaches to it."""
    image = small_image()
    with Registry() as registry, RegistryClient(Reference(registry.host, REPO), OPTIONS, "pull,push") as client:
        image.publish(registry, REPO)
        yield registry, ArtifactRegistry(client), Descriptor(
            media_type=media.OCI_MANIFEST, digest=image.digest, size=len(image.manifest)
        )


Attached = tuple[Registry, ArtifactRegistry, Descriptor]


def test_an_artifact_is_as_the_image_spec_wants_it(attached: Attached) -> None:
    """image-spec 1.1, manifest.md, "Guidelines for Artifact Usage": type, empty config, subject, titles."""
    registry, artifacts, subject = attached
    digest = artifacts.push_artifact(subject, RECEIPT)
    kind, data = registry.manifests[REPO, digest]
    value = json.loads(data)
    assert kind == value["mediaType"] == media.OCI_MANIFEST
    assert (value["artifactType"], value["annotations"]) == (RECEIPT.artifact_type, RECEIPT.annotations)
    assert value["config"]["mediaType"] == "application/vnd.oci.empty.v1+json"
    assert registry.blobs[value["config"]["digest"]] == b"{}" and value["config"]["size"] == 2
    assert value["subject"] == {"mediaType": subject.media_type, "digest": subject.digest, "size": subject.size}
    assert [layer["annotations"]["org.opencontainers.image.title"] for layer in value["layers"]] == ["r.json", "s.json"]


def test_a_listing_in_pages_is_read_to_its_end(attached: Attached) -> None:
    """distribution-spec 1.1, "Listing Referrers": a long list comes in pages, with a Link to the next."""
    registry, artifacts, subject = attached
    pushed = attach(artifacts, subject, [SBOM, RECEIPT])

    def paged(request: Request, reply: Reply) -> Reply | None:
        if request.what != "referrers":
            return None
        value, page = json.loads(reply.body), int(request.query.get("page", "0"))
        more = {"Link": f'</v2/{REPO}/referrers/{subject.digest}?page={page + 1}>; rel="next"'} if page < 2 else {}
        value["manifests"] = value["manifests"][page : page + 1]
        return Reply(200, json.dumps(value).encode(), {**reply.headers, **more})

    registry.faults.append(paged)
    assert {d.digest for d in artifacts.referrers(subject.id)} == set(pushed)


def test_pages_without_end_are_refused(attached: Attached) -> None:
    registry, artifacts, subject = attached
    link = {"Link": f'</v2/{REPO}/referrers/{subject.digest}>; rel="next"'}
    registry.faults.append(lambda q, r: Reply(200, r.body, {**r.headers, **link}) if q.what == "referrers" else None)
    with pytest.raises(PolicyError) as error:
        artifacts.referrers(subject.id)
    assert error.value.code == "limit.document"


def test_what_others_put_in_the_fallback_index_stays(attached: Attached) -> None:
    registry, artifacts, subject = attached
    registry.referrers_api = False
    foreign = {"mediaType": media.OCI_MANIFEST, "digest": Digest.of(b"theirs"), "size": 6, "artifactType": "a/b",
               "annotations": {"k": "v"}, "x-unknown": {"deep": [1]}}  # fmt: skip
    index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [foreign], "annotations": {"by": "them"}}
    tag = f"sha256-{subject.id.hex}"
    registry.put_manifest(REPO, json.dumps(index).encode(), media.OCI_INDEX, tag)
    pushed = attach(artifacts, subject, [SBOM])
    value = json.loads(registry.manifests[REPO, tag][1])
    assert (value["manifests"][0], value["annotations"]) == (foreign, {"by": "them"})
    assert [d["digest"] for d in value["manifests"][1:]] == list(pushed)


def test_a_writer_in_the_same_moment_loses_nothing(attached: Attached) -> None:
    """Another one's entry is read with ours; ours is written again where another wrote over it."""
    registry, artifacts, subject = attached
    registry.referrers_api = False
    tag = f"sha256-{subject.id.hex}"
    theirs = {"mediaType": media.OCI_MANIFEST, "digest": Digest.of(b"theirs"), "size": 6}
    index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [theirs]}

    def over_ours(request: Request, _reply: Reply) -> Reply | None:
        if request.method == "PUT" and request.path.endswith(tag):
            registry.faults.clear()
            registry.put_manifest(REPO, json.dumps(index).encode(), media.OCI_INDEX, tag)
        return None

    registry.faults.append(over_ours)
    pushed = attach(artifacts, subject, [SBOM])
    found = {d["digest"] for d in json.loads(registry.manifests[REPO, tag][1])["manifests"]}
    assert found == {theirs["digest"], *pushed}


def test_a_fallback_tag_that_is_no_index_is_left_alone(attached: Attached) -> None:
    """distribution-spec 1.1, "Pushing Manifests with Subject": a client reports it and stops."""
    registry, artifacts, subject = attached
    registry.referrers_api = False
    tag = f"sha256-{subject.id.hex}"
    registry.manifests[REPO, tag] = registry.manifests[REPO, subject.digest]
    with pytest.raises(FormatError):
        artifacts.push_artifact(subject, SBOM)
    assert registry.manifests[REPO, tag] == registry.manifests[REPO, subject.digest]


def test_a_file_of_an_artifact_that_was_changed_is_found(tmp_path: Path) -> None:
    image = small_image()
    subject = Descriptor(media_type=media.OCI_MANIFEST, digest=image.digest, size=len(image.manifest))
    with Registry() as registry:
        with RegistryClient(Reference(registry.host, REPO), OPTIONS, "pull,push") as client:
            artifacts = ArtifactRegistry(client)
            digest = artifacts.push_artifact(subject, SBOM)
            registry.blobs[Digest.of(b"{}1")] = b"{}2"
            with pytest.raises(IntegrityError) as error:
                artifacts.pull_artifact(digest)
    assert error.value.code == "blob.digest"


# -- the real one --------------------------------------------------------------------------------------------------
