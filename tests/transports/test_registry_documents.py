"""Pulling by digest: which document is taken, and that its bytes are looked at (field reports, group C; C2, C11)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.errors import FormatError, IntegrityError, OciBuilderError, PolicyError, SpecError
from oci_builder.store.blobs import DirStore
from oci_builder.transports.registry_manifests import fetch_manifest
from oci_builder.transports.registry_pull import Pins, load_registry
from tests.lab.images import index_of, small_image
from tests.lab.registry import Registry, Reply, on, status
from tests.transports.registry_case import client_of, held, pull_from

REPO = "team/app"
AMD64 = {"platform": {"architecture": "amd64", "os": "linux"}}
ATTESTED = {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}}


def code_of(registry: Registry, digest: Digest, root: Path, **more: object) -> str:
    with pytest.raises(OciBuilderError) as error:
        pull_from(registry, digest, root, **more)  # type: ignore[arg-type]
    return error.value.code


@pytest.mark.parametrize("docker", [False, True])
@pytest.mark.parametrize("through_index", [False, True])
def test_b082_b085_each_of_the_four_types_is_accepted(tmp_path: Path, docker: bool, through_index: bool) -> None:
    image = small_image(2, docker=docker)
    with Registry() as registry:
        digest = image.publish(registry, REPO)
        if through_index:
            arm = small_image(arch="arm64").descriptor(platform={"architecture": "arm64", "os": "linux"})
            digest = registry.put_manifest(REPO, *index_of(arm, image.descriptor(**AMD64), docker=docker))
        fetched = pull_from(registry, digest, tmp_path)
    assert fetched.root.digest == digest
    assert fetched.resolved.descriptor.digest == image.digest
    assert fetched.resolved.trail == ((digest,) if through_index else ())
    assert {Digest.of(b) for b in image.layers} <= held(tmp_path)


def test_b083_schema_1_is_refused_by_name(tmp_path: Path) -> None:
    old = b'{"schemaVersion":1,"name":"team/app","fsLayers":[],"history":[]}'
    with Registry() as registry:
        digest = registry.put_manifest(REPO, old, media.DOCKER_SCHEMA1_SIGNED)
        assert code_of(registry, digest, tmp_path) == "media.schema1"
        registry.put_manifest(REPO, old, media.OCI_MANIFEST)
        assert code_of(registry, digest, tmp_path) == "media.schema1"


def test_b084_c11_01_the_digest_header_is_advice(tmp_path: Path) -> None:
    image = small_image()
    with Registry() as registry:
        digest = image.publish(registry, REPO)

        def lie(_request: object, reply: Reply) -> Reply:
            return replace(reply, headers={**reply.headers, "Docker-Content-Digest": "sha256:" + "0" * 64})

        registry.faults.append(on("GET", "manifests", lie))
        pull_from(registry, digest, tmp_path / "false header")
        registry.faults = [on("GET", "manifests", lambda _q, r: replace(r, body=r.body[:-1] + b" }"))]
        assert code_of(registry, digest, tmp_path / "false body") == "blob.digest"
    assert held(tmp_path / "false body") == set()


def test_c11_01_a_wrong_layer_under_a_right_header(tmp_path: Path) -> None:
    image = small_image(2)
    with Registry() as registry:
        digest = image.publish(registry, REPO)
        victim = Digest.of(image.layers[1])
        registry.blobs[victim] = bytes(len(image.layers[1]))
        assert code_of(registry, digest, tmp_path) == "blob.digest"
    assert victim not in held(tmp_path)


@pytest.mark.parametrize("mark", [{"platform": {"architecture": "unknown", "os": "unknown"}}, {**AMD64, **ATTESTED}])
@pytest.mark.parametrize("first", [True, False])
def test_b086_b087_attestations_are_passed_over(tmp_path: Path, mark: dict[str, object], first: bool) -> None:
    image, evidence = small_image(), small_image(seed=9)
    entries = [evidence.descriptor(**mark), image.descriptor(**AMD64)]
    with Registry() as registry:
        image.publish(registry, REPO)
        digest = registry.put_manifest(REPO, *index_of(*(entries if first else entries[::-1])))
        assert pull_from(registry, digest, tmp_path).resolved.descriptor.digest == image.digest


@pytest.mark.parametrize("first", [True, False])
def test_b089_the_exact_platform_comes_first(tmp_path: Path, first: bool) -> None:
    plain, v3 = small_image(), small_image(seed=3)
    entries = [v3.descriptor(platform={**AMD64["platform"], "variant": "v3"}), plain.descriptor(**AMD64)]
    with Registry() as registry:
        plain.publish(registry, REPO)
        v3.publish(registry, REPO)
        digest = registry.put_manifest(REPO, *index_of(*(entries if first else entries[::-1])))
        assert pull_from(registry, digest, tmp_path).resolved.descriptor.digest == plain.digest
        chosen = pull_from(registry, digest, tmp_path, platform="linux/amd64/v3")
        assert chosen.resolved.descriptor.digest == v3.digest


def test_b091_a_pinned_manifest_of_another_platform_is_refused_before_any_layer(tmp_path: Path) -> None:
    image = small_image(arch="arm64")
    with Registry() as registry:
        digest = image.publish(registry, REPO)
        assert code_of(registry, digest, tmp_path) == "platform.missing"
        assert not any(Digest.of(image.layers[0]) in call.path for call in registry.log)


def test_b080_a_warm_store_asks_for_no_manifest(tmp_path: Path) -> None:
    image = small_image()
    with Registry() as registry:
        image.publish(registry, REPO)
        digest = registry.put_manifest(REPO, *index_of(image.descriptor(**AMD64)))
        pull_from(registry, digest, tmp_path)
        assert len(registry.calls("GET", "manifests")) == 2
        registry.log.clear()
        pull_from(registry, digest, tmp_path)
        assert registry.log == []


def test_both_lower_pins_are_checked(tmp_path: Path) -> None:
    image = small_image()
    other = Digest.of(b"other")
    with Registry() as registry:
        digest = image.publish(registry, REPO)
        assert code_of(registry, digest, tmp_path, pins=Pins(manifest=other)) == "pin.manifest"
        assert code_of(registry, digest, tmp_path, pins=Pins(config=other)) == "pin.config"
        assert registry.calls("GET", "blobs") == []
        pull_from(registry, digest, tmp_path, pins=Pins(image.digest, Digest.of(image.config)))


def test_a_layer_that_lies_about_its_tar_is_found(tmp_path: Path) -> None:
    image = small_image(2)
    config = image.config.replace(image.config.split(b"sha256:")[1][:64], b"0" * 64)
    manifest = image.manifest.replace(Digest.of(image.config).encode(), Digest.of(config).encode())
    with Registry() as registry:
        image.publish(registry, REPO)
        registry.put_blob(config)
        digest = registry.put_manifest(REPO, manifest, media.OCI_MANIFEST)
        assert code_of(registry, digest, tmp_path) == "layer.diff_id"


@pytest.mark.parametrize("kind", sorted(media.FOREIGN_LAYERS))
def test_foreign_layers_are_refused_and_never_fetched(tmp_path: Path, kind: str) -> None:
    with Registry() as registry:
        url = f"{registry.url}/elsewhere"
        image = small_image(1, layers_=lambda found: [{**found[0], "mediaType": kind, "urls": [url]}])
        digest = image.publish(registry, REPO)
        assert code_of(registry, digest, tmp_path) == "media.foreign"
        assert not any("elsewhere" in call.path for call in registry.log)


def test_urls_of_an_ordinary_layer_are_ignored(tmp_path: Path) -> None:
    with Registry() as registry, Registry() as other:
        image = small_image(1, layers_=lambda found: [{**found[0], "urls": [f"{other.url}/layer"]}])
        digest = image.publish(registry, REPO)
        pull_from(registry, digest, tmp_path)
        assert other.log == []


def test_c2_09_a_digest_is_never_a_path(tmp_path: Path) -> None:
    evil = {"mediaType": media.OCI_CONFIG, "digest": "sha256:../../../../etc/passwd", "size": 1}
    image = small_image(1, config=lambda _found: evil)
    with Registry() as registry:
        assert code_of(registry, image.publish(registry, REPO), tmp_path) == "json.digest"


def test_c3_keys_of_two_kinds_are_refused(tmp_path: Path) -> None:
    image = small_image(1, manifests=lambda _none: [])
    with Registry() as registry:
        assert code_of(registry, image.publish(registry, REPO), tmp_path) == "json.ambiguous"


def test_a_content_type_that_contradicts_the_document_is_refused(tmp_path: Path) -> None:
    image = small_image()
    with Registry() as registry:
        image.publish(registry, REPO)
        digest = registry.put_manifest(REPO, image.manifest, media.OCI_INDEX)
        assert code_of(registry, digest, tmp_path) == "media.mismatch"


def test_an_endless_manifest_is_cut(tmp_path: Path) -> None:
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        registry.faults.append(on("GET", "manifests", lambda _q, r: replace(r, endless=True, body=b"{")))
        with pytest.raises(PolicyError) as error:
            pull_from(registry, digest, tmp_path)
    assert error.value.code == "limit.document"


def test_a_config_that_is_stated_too_large_is_not_asked_for(tmp_path: Path) -> None:
    image = small_image(1, config=lambda found: {**found, "size": 1 << 40})
    with Registry() as registry:
        assert code_of(registry, image.publish(registry, REPO), tmp_path) == "limit.document"
        assert registry.calls("GET", "blobs") == []


def test_a_manifest_of_another_size_than_its_index_says(tmp_path: Path) -> None:
    image = small_image()
    with Registry() as registry:
        image.publish(registry, REPO)
        entry = {**image.descriptor(**AMD64), "size": len(image.manifest) + 1}
        digest = registry.put_manifest(REPO, *index_of(entry))
        assert code_of(registry, digest, tmp_path) == "blob.size"
        with DirStore(tmp_path / "store") as store, client_of(registry, None) as client:
            fetch_manifest(client, image.digest, store)
        assert code_of(registry, digest, tmp_path) == "blob.size"


def test_a_missing_manifest_says_what_the_registry_said(tmp_path: Path) -> None:
    with Registry() as registry, pytest.raises(OciBuilderError) as error:
        pull_from(registry, Digest.of(b"nothing"), tmp_path)
    assert error.value.code == "http.status"
    assert "MANIFEST_UNKNOWN" in error.value.message


def test_load_registry_gives_an_image_whose_layers_are_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    image = small_image(3, docker=True)
    with Registry() as registry, DirStore(tmp_path / "store") as store:
        digest = image.publish(registry, REPO)
        found = load_registry(f"{registry.host}/{REPO}:v1", digest, store)
        assert (found.manifest, found.root) == (image.digest, digest)
        loaded = found.image
        assert [layer.descriptor.digest for layer in loaded.layers] == [Digest.of(b) for b in image.layers]
        assert {layer.descriptor.media_type for layer in loaded.layers} == {media.OCI_LAYER_GZIP}
        assert loaded.settings["config"] == {"Env": ["A=1"]}
        with pytest.raises(SpecError) as error:
            load_registry(f"{registry.host}/{REPO}:v1", None, store)
    assert error.value.code == "spec.digest"


def test_a_server_error_that_stays_is_an_error_after_some_tries(tmp_path: Path) -> None:
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        registry.faults.append(on("GET", "manifests", status(503)))
        assert code_of(registry, digest, tmp_path, attempts=3) == "http.status"
        assert len(registry.calls("GET", "manifests")) == 3


def test_documents_that_are_not_json_are_format_errors(tmp_path: Path) -> None:
    with Registry() as registry:
        for body, code in ((b"[]", "json.field"), (b"<html>", "json.syntax"), (b'{"a":1,"a":2}', "json.duplicate")):
            digest = registry.put_manifest(REPO, body, media.OCI_MANIFEST)
            with pytest.raises(FormatError) as error:
                pull_from(registry, digest, tmp_path)
            assert error.value.code == code


def test_wrong_sizes_are_integrity_errors_and_leave_nothing(tmp_path: Path) -> None:
    for change in (1, -1):
        image = small_image(1, layers_=lambda found, change=change: [{**found[0], "size": found[0]["size"] + change}])
        with Registry() as registry, pytest.raises(IntegrityError) as error:
            pull_from(registry, image.publish(registry, REPO), tmp_path / str(change))
        assert error.value.code == "blob.size"
