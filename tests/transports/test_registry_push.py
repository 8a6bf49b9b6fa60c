"""Pushing images and evidence, into docker-registry and into a registry that fails."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import (
    IntegrityError,
    OciBuilderError,
    PolicyError,
    SpecError,
    TransportError,
)
from oci_builder.push import push
from oci_builder.release.attach import attach
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_artifacts import ArtifactRegistry
from oci_builder.transports.registry_policy import RegistryOptions
from oci_builder.transports.registry_reference import Reference
from oci_builder.transports.registry_source import BASE_NAME
from tests.lab.dockerregistry import LOGIN, docker_registry, needs_registry
from tests.lab.images import SmallImage, small_image
from tests.lab.registry import Fault, Registry, Reply, on, status
from tests.lab.registry_tokens import Clock, Tokens
from tests.transports.registry_case import RECEIPT, REPO, SBOM


@pytest.fixture(autouse=True)
def _nobody_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


def layout_of(image: SmallImage, folder: Path) -> Path:
    """The image as an OCI layout."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for blob in (image.manifest, image.config, *image.layers):
        (blobs / Digest.of(blob).hex).write_bytes(blob)
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [image.descriptor()]}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def tar_of(layout: Path) -> Path:
    """The layout as an OCI archive."""
    path = layout.with_suffix(".tar")
    with tarfile.open(path, "w") as tar:
        for name in ("oci-layout", "index.json", "blobs"):
            tar.add(layout / name, name)
    return path


def has_all(registry: Registry, image: SmallImage) -> bool:
    return all(registry.blobs.get(Digest.of(b)) == b for b in (image.config, *image.layers))


@pytest.mark.parametrize("archive", [False, True])
def test_a_layout_and_an_archive_are_pushed_once(tmp_path: Path, archive: bool) -> None:
    image = small_image(3)
    source = layout_of(image, tmp_path / "image")
    source = tar_of(source) if archive else source
    with Registry() as registry:
        first = push(source, f"{registry.host}/{REPO}:v1")
        assert has_all(registry, image)
        assert registry.manifests[REPO, "v1"] == (media.OCI_MANIFEST, image.manifest)
        assert registry.manifests[REPO, image.digest][1] == image.manifest
        again = push(source, f"{registry.host}/{REPO}:v1")
    assert (first.manifest, first.uploaded, again.uploaded) == (image.digest, 4, 0)


def test_the_scope_asks_for_push(tmp_path: Path) -> None:
    source = layout_of(small_image(), tmp_path / "image")
    with Registry() as registry:
        tokens = Tokens(registry)
        registry.faults = [tokens]
        push(source, f"{registry.host}/{REPO}:v1")
    assert tokens.scopes == [f"repository:{REPO}:pull,push"]


def test_a_dead_token_in_mid_push_sends_the_blob_again(tmp_path: Path) -> None:
    image = small_image(3)
    source = layout_of(image, tmp_path / "image")
    with Registry() as registry:
        clock = Clock()
        tokens = Tokens(registry, lifetime=25, tell_lifetime=False, clock=clock)
        registry.faults = [tokens, on("POST", "uploads", clock.passing(20))]
        push(source, f"{registry.host}/{REPO}:v1")
        assert has_all(registry, image)
        sent = registry.calls("PATCH", "uploads")
    assert len(tokens.scopes) > 1
    assert len(sent) > len({call.path for call in sent})


@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT"])
def test_server_errors_in_every_step_are_tried_again(tmp_path: Path, method: str) -> None:
    image = small_image(2)
    source = layout_of(image, tmp_path / "image")
    with Registry() as registry:
        registry.faults = [on(method, "uploads", status(503), times=2)]
        push(source, f"{registry.host}/{REPO}:v1")
        assert has_all(registry, image)


def test_a_corrupt_blob_is_never_committed_and_nothing_is_named(tmp_path: Path) -> None:
    image = small_image(2)
    source = layout_of(image, tmp_path / "image")
    victim = source / "blobs" / "sha256" / Digest.of(image.layers[0]).hex
    victim.write_bytes(bytes(len(image.layers[0])))
    with Registry() as registry, pytest.raises(IntegrityError) as error:
        push(source, f"{registry.host}/{REPO}:v1")
    assert error.value.code == "blob.digest"
    assert registry.manifests == {}


@pytest.mark.parametrize("change", [b"", b"x"])
def test_a_blob_of_another_size_is_an_integrity_error(tmp_path: Path, change: bytes) -> None:
    image = small_image(1)
    source = layout_of(image, tmp_path / "image")
    victim = source / "blobs" / "sha256" / Digest.of(image.layers[0]).hex
    victim.write_bytes(image.layers[0] + change if change else image.layers[0][:-1])
    with Registry() as registry, pytest.raises(IntegrityError) as error:
        push(source, f"{registry.host}/{REPO}:v1")
    assert error.value.code == "blob.size"
    assert registry.manifests == {}


def test_another_manifest_that_comes_back_is_an_integrity_error(tmp_path: Path) -> None:
    source = layout_of(small_image(), tmp_path / "image")
    with Registry() as registry:
        registry.faults = [on("GET", "manifests", lambda _q, r: replace(r, body=r.body + b" "))]
        with pytest.raises(IntegrityError) as error:
            push(source, f"{registry.host}/{REPO}:v1")
    assert error.value.code == "blob.digest"


def test_c11_08_an_upload_location_elsewhere_gets_no_authorization(tmp_path: Path) -> None:
    image = small_image()
    source = layout_of(image, tmp_path / "image")
    with Registry() as registry, Registry() as other:
        tokens = Tokens(registry)
        other.blobs, other.uploads = registry.blobs, registry.uploads

        def elsewhere(_request: object, reply: Reply) -> Reply | None:
            location = reply.headers.get("Location", "")
            moved = {**reply.headers, "Location": other.url + location}
            return replace(reply, headers=moved) if location.startswith("/") else None

        registry.faults = [on("POST", "uploads", elsewhere), tokens]
        push(source, f"{registry.host}/{REPO}:v1")
        assert other.calls("PATCH", "uploads")
        assert all("authorization" not in call.headers for call in other.log)
    assert has_all(registry, image)


def test_c11_08_an_upload_location_into_the_cloud_is_refused(tmp_path: Path) -> None:
    source = layout_of(small_image(), tmp_path / "image")
    with Registry() as registry:
        place = {"Location": "http://169.254.169.254/upload"}
        registry.faults = [on("POST", "uploads", lambda _q, r: replace(r, headers=place))]
        with pytest.raises(PolicyError) as error:
            push(source, f"{registry.host}/{REPO}:v1")
    assert error.value.code == "http.redirect"


def test_a_refused_push_says_why_and_shows_no_state(tmp_path: Path) -> None:
    source = layout_of(small_image(), tmp_path / "image")
    denied = b'{"errors":[{"code":"SIZE_INVALID","message":"quota exceeded"}]}'
    with Registry() as registry:
        registry.faults = [on("PATCH", "uploads", lambda _q, _r: Reply(413, denied))]
        with pytest.raises(TransportError) as error:
            push(source, f"{registry.host}/{REPO}:v1")
        assert len(registry.calls("PATCH", "uploads")) <= 2
    assert "quota exceeded" in error.value.message
    assert "s3cr3t-state" not in f"{error.value} {error.value.fields}"


def test_a_compressed_archive_is_refused_with_what_to_use(tmp_path: Path) -> None:
    path = tar_of(layout_of(small_image(), tmp_path / "image"))
    subprocess.run(["gzip", str(path)], check=True)
    with pytest.raises(SpecError) as error:
        push(path.with_suffix(".tar.gz"), "localhost:1/x:y")
    assert error.value.code == "spec.archive"
    assert "runtime.oci.tar" in error.value.message


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, code in ((tmp_path / "absent", "spec.path"), (tmp_path / "empty", "spec.path")):
        with pytest.raises(OciBuilderError) as error:
            push(path, "localhost:1/x:y")
        assert error.value.code == code


def test_a_digest_in_the_reference_must_be_the_image_s(tmp_path: Path) -> None:
    source = layout_of(small_image(), tmp_path / "image")
    with pytest.raises(SpecError) as error:
        push(source, f"localhost:1/x:y@{Digest.of(b'other')}")
    assert error.value.code == "spec.digest"


@needs_registry
@pytest.mark.parametrize("login", [False, True])
def test_docker_registry_takes_image_and_evidence(tmp_path: Path, login: bool) -> None:
    image = small_image(3, size=200_000)
    source = layout_of(image, tmp_path / "image")
    with docker_registry(tmp_path / "registry", login=login) as registry:
        if login:
            with pytest.raises(TransportError) as error:
                push(source, f"{registry.host}/{REPO}:v1")
            assert error.value.code == "auth"
            (tmp_path / "docker").mkdir()
            auth = base64.b64encode(":".join(LOGIN).encode()).decode()
            (tmp_path / "docker" / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
        pushed = push(source, f"{registry.host}/{REPO}:v1")
        assert push(source, f"{registry.host}/{REPO}:v1").uploaded == 0
        with RegistryClient(Reference(registry.host, REPO), RegistryOptions(), "pull,push") as client:
            subject = Descriptor(media_type=pushed.media_type, digest=pushed.manifest, size=pushed.size)
            assert len(attach(ArtifactRegistry(client), subject, [SBOM, RECEIPT])) == 2
        if shutil.which("skopeo"):
            options_of_skopeo = ["--creds", ":".join(LOGIN)] if login else []
            found = subprocess.run(
                ["skopeo", "inspect", "--tls-verify=false", *options_of_skopeo, f"docker://{registry.host}/{REPO}:v1"],
                check=True, capture_output=True,
            )  # fmt: skip
            assert json.loads(found.stdout)["Digest"] == image.digest


@needs_registry
def test_the_base_s_layers_are_taken_from_where_they_are(tmp_path: Path) -> None:
    """A registry that has the base gives its blobs to another repository: they do not travel."""
    base = small_image(2, size=5000)
    both = small_image(3, size=5000)
    with docker_registry(tmp_path / "registry") as registry:
        push(layout_of(base, tmp_path / "base"), f"{registry.host}/team/base:v1")
        image = small_image(3, size=5000, annotations=lambda _: {BASE_NAME: f"{registry.host}/team/base:v1"})
        assert image.layers[:2] == base.layers and image.layers == both.layers
        pushed = push(layout_of(image, tmp_path / "image"), f"{registry.host}/team/app:v1")
        assert pushed.uploaded == 2, "the third layer and the config"
        other = push(layout_of(both, tmp_path / "both"), f"{registry.host}/team/other:v1")
        assert other.uploaded == 4, "without the base's name nobody knows where to look"
        assert registry.log.read_text().count("mount=sha256") >= 2


@pytest.mark.parametrize("answer", [status(404), status(405), status(400)])
def test_a_registry_that_mounts_nothing_is_sent_everything(tmp_path: Path, answer: Fault) -> None:
    with Registry() as registry:
        image = small_image(2, annotations=lambda _: {BASE_NAME: f"{registry.host}/team/base@sha256:{'a' * 64}"})
        tokens = Tokens(registry)
        registry.faults = [lambda q, r: answer(q, r) if "mount" in q.query else None, tokens]
        push(layout_of(image, tmp_path / "image"), f"{registry.host}/{REPO}:v1")
        assert has_all(registry, image)
        assert tokens.scopes == [f"repository:{REPO}:pull,push repository:team/base:pull"]


@pytest.mark.parametrize("name", ["elsewhere.test/team/base:v1", "team/base", "Not A Reference", "{host}/" + REPO])
def test_a_base_from_elsewhere_is_not_asked_for(tmp_path: Path, name: str) -> None:
    with Registry() as registry:
        image = small_image(2, annotations=lambda _: {BASE_NAME: name.format(host=registry.host)})
        push(layout_of(image, tmp_path / "image"), f"{registry.host}/{REPO}:v1")
        assert not [call for call in registry.log if "mount" in call.query]
