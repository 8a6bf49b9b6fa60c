"""A release in a real registry: image, evidence as referrers, pulled back (issue 7, item 5)."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.model.digest import Digest
from oci_builder.model.errors import IntegrityError, OciBuilderError, PolicyError, SpecError, TransportError
from oci_builder.model.receipts import OCI
from oci_builder.publish_registry import RegistryDelivery, publish_registry
from oci_builder.pull import pull
from oci_builder.qualification import Rules, check_release, update_release
from oci_builder.release.attach import PROVENANCE_ARTIFACT, RECEIPT_ARTIFACT, SBOM_TYPE
from oci_builder.release.delivery import Judge, Publication
from oci_builder.release.host import utc_now
from oci_builder.release.receipts import Answer, judge
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_artifacts import ArtifactRegistry
from oci_builder.transports.registry_policy import RegistryOptions
from oci_builder.transports.registry_reference import parse_reference
from tests.lab.dockerregistry import LOGIN, DockerRegistry, docker_registry, needs_registry
from tests.release.built import KEY, make_release, publication
from tests.release.helpers import policy, trusted

pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")
pytestmark = needs_registry
QUICK = RegistryOptions(attempts=2, first_pause=0.01)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerRegistry]:
    with docker_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def release(made: Path, tmp_path: Path) -> Publication:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return publication(tmp_path)


@pytest.fixture
def name(registry: DockerRegistry, tmp_path: Path) -> str:
    return f"{registry.host}/{tmp_path.name.replace('_', '-').lower()}:t"


def listed(name: str, done: RegistryDelivery) -> list[tuple[str, dict[str, bytes]]]:
    """(artifact type, files) of everything that refers to the image."""
    with RegistryClient(parse_reference(name), QUICK, "pull") as client:
        known = ArtifactRegistry(client)
        return [(d.artifact_type or "", dict(known.pull_artifact(d.id))) for d in known.referrers(done.manifest)]


def test_image_and_evidence_come_back(name: str, release: Publication, tmp_path: Path) -> None:
    done = publish_registry(release, name, QUICK)
    pulled = pull(done.reference, tmp_path / "layout")
    recorded = json.loads((release.folder.root / "container.json").read_text())
    assert pulled.manifest == recorded["manifest"]["digest"] == done.manifest
    found = listed(name, done)
    files = {n: d for _, kept in found for n, d in kept.items()}
    assert {"image.cdx.json", "a.cdx.json", "b.cdx.json", "provenance.json", done.receipt.name} <= files.keys()
    assert {kind for kind, _ in found} == {SBOM_TYPE, PROVENANCE_ARTIFACT, RECEIPT_ARTIFACT}
    for path in [*release.folder.root.glob("*.cdx.json"), *release.folder.receipts.iterdir()]:
        assert files[path.name] == path.read_bytes()


def test_the_delivery_receipt_signs_the_image_s_manifest(name: str, release: Publication) -> None:
    done = publish_registry(release, name, QUICK)
    policy_ = policy(trusted(KEY, not_after="2099-01-01T00:00:00Z"))
    verdict = judge(done.receipt.read_bytes(), policy_, now=utc_now(), subjects=release.folder.subjects())
    assert (verdict.answer, verdict.reasons) == (Answer.VERIFIED, ())
    assert verdict.statement is not None
    assert verdict.statement.digests[name] == done.manifest.hex
    assert [c.name for c in verdict.statement.predicate.checks] == ["secrets", "pushed", "pulled-back", "referrers"]
    assert set(verdict.statement.predicate.details["referrers"]) >= {"image.cdx.json", "provenance.json"}


def test_the_fallback_tag_lists_them_where_there_is_no_api(
    name: str, release: Publication, registry: DockerRegistry
) -> None:
    """Debian's registry knows no referrers API (distribution-spec 1.1, referrers tag schema)."""
    done = publish_registry(release, name, QUICK)
    repository = name.partition("/")[2].rpartition(":")[0]
    url = f"http://{registry.host}/v2/{repository}/manifests/sha256-{done.manifest.hex}"
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.oci.image.index.v1+json"})
    with urllib.request.urlopen(request) as answer:
        index = json.load(answer)
    assert {m["digest"] for m in index["manifests"]} == set(done.referrers)
    assert all(m["artifactType"] for m in index["manifests"])
    titles = {m["annotations"]["org.opencontainers.image.title"]: m["digest"] for m in index["manifests"]}
    assert {"a.cdx.json", "image.cdx.json", "provenance.json", done.receipt.name} <= titles.keys()
    if shutil.which("skopeo"):
        command = ["skopeo", "inspect", "--raw", "--tls-verify=false"]
        place = f"docker://{name.rpartition(':')[0]}@{titles['image.cdx.json']}"
        raw = json.loads(subprocess.run([*command, place], capture_output=True, check=True).stdout)
        assert (raw["artifactType"], raw["subject"]["digest"]) == (SBOM_TYPE, done.manifest)


def test_the_verdict_follows_the_delivery_and_is_attached(name: str, release: Publication) -> None:
    place = release.folder.root.parent.parent
    rules = Rules.load(place / "spec.json", place / "trust.json")
    update_release(release.folder.root, rules, utc_now())
    done = publish_registry(replace(release, judge=Judge(rules.gates, rules.policy, rules.spec)), name, QUICK)
    assert check_release(release.folder.root, rules)["gates"][0]["state"] == "met"
    files = {n: d for _, kept in listed(name, done) for n, d in kept.items()}
    assert files["qualification.json"] == (release.folder.root / "qualification.json").read_bytes()


def test_a_second_publication_sends_no_blob_again(name: str, release: Publication) -> None:
    first = publish_registry(release, name, QUICK)
    second = publish_registry(release, name, QUICK)
    assert set(first.referrers) <= set(second.referrers) and first.receipt != second.receipt


def test_a_secret_stops_it_before_anything_is_sent(name: str, release: Publication, registry: DockerRegistry) -> None:
    before = registry.log.read_bytes()
    release.helper.write_text("TOKEN=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\n")
    with pytest.raises(PolicyError):
        publish_registry(release, name, QUICK)
    assert registry.log.read_bytes() == before


def test_an_archive_that_is_not_the_recorded_one_is_not_pushed(name: str, release: Publication) -> None:
    data = bytearray((release.archives / OCI).read_bytes())
    data[-2000] ^= 1
    (release.archives / OCI).write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        publish_registry(release, name, QUICK)
    assert caught.value.code == "blob.digest"


def test_a_digest_of_another_image_is_refused(name: str, release: Publication) -> None:
    with pytest.raises(SpecError) as caught:
        publish_registry(release, f"{name}@{Digest.of(b'x')}", QUICK)
    assert caught.value.code == "spec.digest"


def test_bytes_that_the_registry_changed_are_found_out(release: Publication, tmp_path: Path) -> None:
    """A layer that rots on the registry's disk after the push: pulling back finds it, and no receipt says delivered."""
    with docker_registry(tmp_path / "own") as running:
        name = f"{running.host}/x:t"
        publish_registry(release, name, QUICK)
        layer = json.loads((release.folder.root / "container.json").read_text())["layers"][0]
        stored = tmp_path / "own/data/docker/registry/v2/blobs/sha256" / layer["digest"][7:9] / layer["digest"][7:]
        data = bytearray((stored / "data").read_bytes())
        data[len(data) // 2] ^= 1
        (stored / "data").write_bytes(data)
        receipts = len(list(release.folder.receipts.iterdir()))
        with pytest.raises(OciBuilderError) as caught:
            publish_registry(release, name, QUICK)
    assert caught.value.code == "blob.digest"
    assert len(list(release.folder.receipts.iterdir())) == receipts


def test_no_password_is_in_anything_that_was_written(
    release: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    with docker_registry(tmp_path / "own", login=True) as running:
        name = f"{running.host}/x:t"
        with pytest.raises(TransportError) as caught:
            wrong = replace(QUICK, find_credential=lambda *_: _credential("wrong-password"))
            publish_registry(release, name, wrong, lambda e: events.append(str(e)))
        right = replace(QUICK, find_credential=lambda *_: _credential(LOGIN[1]))
        publish_registry(release, name, right, lambda e: events.append(str(e)))
    assert caught.value.code == "auth"
    said = [*events, str(caught.value), repr(caught.value.fields)]
    written = [p.read_bytes().decode("latin-1") for p in release.folder.root.rglob("*") if p.is_file()]
    assert not any(word in text for text in [*said, *written] for word in ("wrong-password", LOGIN[1]))


def _credential(password: str) -> object:
    from oci_builder.transports.credentials import Credential

    return Credential(LOGIN[0], password)


def test_a_tag_that_named_another_image_is_told(name: str, release: Publication, tmp_path: Path) -> None:
    """Whoever pulls by tag gets another image from now on."""
    events: list[str] = []
    publish_registry(release, name, QUICK, lambda event: events.append(event.message))
    publish_registry(release, name, QUICK, lambda event: events.append(event.message))
    assert not [text for text in events if "before" in text]
    other = make_release(tmp_path / "other", labels={"x": "another"})
    publish_registry(other, name, QUICK, lambda event: events.append(event.message))
    assert len([text for text in events if "before, and now this image" in text]) == 1


def test_a_folder_that_takes_no_receipt_is_told_before_anything_is_sent(
    name: str, release: Publication, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise TransportError("io.readonly", "read-only")

    monkeypatch.setattr("oci_builder.release.files._write_temp", full)
    with pytest.raises(TransportError) as caught:
        publish_registry(release, "127.0.0.1:1/x:t", QUICK)
    assert caught.value.code == "io.readonly"
