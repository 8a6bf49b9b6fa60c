"""The pull verb: a complete OCI layout that others read, or nothing that looks like one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.errors import ConflictError, IntegrityError, OciBuilderError, SpecError
from oci_builder.pull import PullOptions, pull
from oci_builder.push import push
from tests.lab.certificates import make_certificates, needs_openssl
from tests.lab.dockerregistry import docker_registry, needs_registry
from tests.lab.images import SmallImage, index_of, small_image
from tests.lab.registry import Allowance, Registry, on
from tests.lab.waits import until
from tests.transports.test_registry_push import layout_of

REPO = "team/app"
PULL = "import sys; from pathlib import Path; from oci_builder.pull import pull; pull(sys.argv[1], Path(sys.argv[2]))"


@pytest.fixture(autouse=True)
def _nobody_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


def check_layout(dest: Path, image: SmallImage, *names: str) -> None:
    """Every blob is there and right, and nothing else but the documents."""
    assert sorted(os.listdir(dest)) == ["blobs", "index.json", "oci-layout"]
    for blob in (dest / "blobs" / "sha256").iterdir():
        assert Digest.of(blob.read_bytes()).hex == blob.name
    for data in (image.manifest, image.config, *image.layers):
        assert (dest / Digest.of(data).blob_path).read_bytes() == data
    entries = json.loads((dest / "index.json").read_bytes())["manifests"]
    assert [e["annotations"]["org.opencontainers.image.ref.name"] for e in entries] == list(names)


def test_the_registry_s_bytes_become_a_layout(tmp_path: Path) -> None:
    image = small_image(3)
    with Registry() as registry:
        image.publish(registry, REPO)
        data, kind = index_of(image.descriptor(platform={"architecture": "amd64", "os": "linux"}))
        digest = registry.put_manifest(REPO, data, kind)
        pulled = pull(f"{registry.host}/{REPO}:v1@{digest}", tmp_path / "dest")
        check_layout(tmp_path / "dest", image, f"{registry.host}/{REPO}:v1")
    assert (tmp_path / "dest" / digest.blob_path).read_bytes() == data
    assert (pulled.root, pulled.manifest, pulled.config) == (digest, image.digest, Digest.of(image.config))
    assert [layer["digest"] for layer in pulled.to_json()["layers"]] == [Digest.of(b) for b in image.layers]


def test_b080_again_asks_for_nothing_and_changes_nothing(tmp_path: Path) -> None:
    image = small_image(2)
    with Registry() as registry:
        reference = f"{registry.host}/{REPO}:v1@{image.publish(registry, REPO)}"
        pull(reference, tmp_path / "dest")
        before = (tmp_path / "dest" / "index.json").read_bytes()
        registry.log.clear()
        pull(reference, tmp_path / "dest")
        assert registry.log == []
    assert (tmp_path / "dest" / "index.json").read_bytes() == before


def test_c2_14_a_blob_that_rotted_in_the_layout_is_fetched_anew(tmp_path: Path) -> None:
    image = small_image(2)
    with Registry() as registry:
        reference = f"{registry.host}/{REPO}:v1@{image.publish(registry, REPO)}"
        pull(reference, tmp_path / "dest")
        (tmp_path / "dest" / Digest.of(image.layers[0]).blob_path).write_bytes(b"rot")
        pull(reference, tmp_path / "dest")
        check_layout(tmp_path / "dest", image, f"{registry.host}/{REPO}:v1")


def named(dest: Path) -> list[tuple[str, str]]:
    """The layout's images: name and digest."""
    entries = json.loads((dest / "index.json").read_bytes())["manifests"]
    return [(e["annotations"]["org.opencontainers.image.ref.name"], e["digest"]) for e in entries]


def test_a_name_moves_and_an_image_has_several(tmp_path: Path) -> None:
    one, two = small_image(seed=1), small_image(seed=2)
    with Registry() as registry:
        names = [f"{registry.host}/{REPO}:{tag}" for tag in ("a", "b")]
        for image, name in ((one, names[0]), (two, names[0]), (two, names[1])):
            pull(f"{name}@{image.publish(registry, REPO)}", tmp_path / "dest")
    assert named(tmp_path / "dest") == [(names[0], two.digest), (names[1], two.digest)]


def test_another_image_beside_one_is_refused_before_anything(tmp_path: Path) -> None:
    """Nothing would say which of the two is meant: verify, inspect and unpack refuse such a layout."""
    one, two = small_image(seed=1), small_image(seed=2)
    with Registry() as registry:
        pull(f"{registry.host}/{REPO}:a@{one.publish(registry, REPO)}", tmp_path / "dest")
        other = f"{registry.host}/{REPO}:b@{two.publish(registry, REPO)}"
        registry.log.clear()
        with pytest.raises(ConflictError) as error:
            pull(other, tmp_path / "dest")
        assert error.value.code == "pull.other_image" and f"{REPO}:a" in error.value.message
        assert registry.log == []
        check_layout(tmp_path / "dest", one, f"{registry.host}/{REPO}:a")


def test_an_image_that_a_name_left_does_not_come_back_under_another(tmp_path: Path) -> None:
    """Its blobs are in the layout still, so this is seen only when it is to get its name."""
    one, two = small_image(seed=1), small_image(seed=2)
    with Registry() as registry:
        a, b = (f"{registry.host}/{REPO}:{tag}" for tag in "ab")
        for image in (one, two):
            pull(f"{a}@{image.publish(registry, REPO)}", tmp_path / "dest")
        with pytest.raises(ConflictError) as error:
            pull(f"{b}@{one.digest}", tmp_path / "dest")
    assert error.value.code == "pull.other_image"
    assert named(tmp_path / "dest") == [(a, two.digest)]
    assert sorted(os.listdir(tmp_path / "dest")) == ["blobs", "index.json", "oci-layout"]


def test_images_of_two_platforms_share_a_layout(tmp_path: Path) -> None:
    one, two = small_image(seed=1), small_image(seed=2, arch="arm64")
    with Registry() as registry:
        a, b = (f"{registry.host}/{REPO}:{tag}" for tag in "ab")
        pull(f"{a}@{one.publish(registry, REPO)}", tmp_path / "dest")
        pull(f"{b}@{two.publish(registry, REPO)}", tmp_path / "dest", PullOptions(platform="linux/arm64"))
    assert named(tmp_path / "dest") == [(a, one.digest), (b, two.digest)]


@pytest.mark.parametrize("kind", ["file", "pipe", "folder of pipes"])
def test_b124_a_destination_that_is_no_folder_of_ours_is_left_alone_and_not_waited_for(
    tmp_path: Path, kind: str
) -> None:
    dest = tmp_path / "dest"
    if kind == "file":
        dest.write_text("mine")
    elif kind == "pipe":
        os.mkfifo(dest)
    else:
        (dest / "blobs/sha256").mkdir(parents=True)
        for name in ("oci-layout", "index.json"):
            os.mkfifo(dest / name)
    with Registry() as registry, pytest.raises(ConflictError) as error:
        pull(f"{registry.host}/{REPO}@{small_image().publish(registry, REPO)}", dest)
    assert error.value.code == "pull.not_layout"
    assert kind != "file" or dest.read_text() == "mine"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with Registry() as registry, pytest.raises(ConflictError) as error:
        pull(f"{registry.host}/{REPO}@{small_image().publish(registry, REPO)}", tmp_path)
    assert error.value.code == "pull.not_layout"
    assert os.listdir(tmp_path) == ["precious"]


def test_a_tag_alone_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        pull("localhost:1/x:latest", tmp_path / "dest")
    assert error.value.code == "spec.digest"
    assert not (tmp_path / "dest").exists()


def test_a_failure_names_nothing_and_a_hopeless_one_leaves_nothing(tmp_path: Path) -> None:
    image = small_image(2)
    with Registry() as registry:
        digest = image.publish(registry, REPO)
        registry.blobs[Digest.of(image.layers[1])] = bytes(len(image.layers[1]))
        with pytest.raises(IntegrityError):
            pull(f"{registry.host}/{REPO}@{digest}", tmp_path / "one")
        with pytest.raises(OciBuilderError):
            pull(f"{registry.host}/{REPO}@{Digest.of(b'absent')}", tmp_path / "two")
    assert not (tmp_path / "one" / "index.json").exists()
    assert not (tmp_path / "two").exists()


def test_with_prove_a_layer_that_is_not_its_diff_id_is_refused(tmp_path: Path) -> None:
    image = small_image(1)
    config = image.config.replace(image.config.split(b"sha256:")[1][:64], b"0" * 64)
    manifest = image.manifest.replace(Digest.of(image.config).encode(), Digest.of(config).encode())
    with Registry() as registry:
        image.publish(registry, REPO)
        registry.put_blob(config)
        digest = registry.put_manifest(REPO, manifest, media.OCI_MANIFEST)
        with pytest.raises(IntegrityError) as error:
            pull(f"{registry.host}/{REPO}@{digest}", tmp_path / "dest", PullOptions(prove=True))
    assert error.value.code == "layer.diff_id"
    assert not (tmp_path / "dest" / "index.json").exists()


def test_kill_9_leaves_no_image_and_the_next_run_goes_on(tmp_path: Path) -> None:
    image = small_image(3, size=300_000)
    dest = tmp_path / "dest"
    with Registry() as registry:
        reference = f"{registry.host}/{REPO}:v1@{image.publish(registry, REPO)}"
        for size in (50_000, 250_000, 250_000):
            allowance = Allowance(size)
            registry.faults = [on("GET", "blobs", lambda _q, r, gate=allowance: replace(r, chunk=20_000, gate=gate))]
            environment = {**os.environ, "PYTHONPATH": os.getcwd()}
            process = subprocess.Popen([sys.executable, "-c", PULL, reference, str(dest)], env=environment)
            assert allowance.used.wait(300)
            until(lambda: any(part.stat().st_size for part in dest.rglob("*.part")))
            process.send_signal(signal.SIGKILL)
            process.wait()
            allowance.ended.set()
            assert not (dest / "index.json").exists()
            for blob in (dest / "blobs" / "sha256").iterdir():
                assert Digest.of(blob.read_bytes()).hex == blob.name
        registry.faults = []
        pull(reference, dest)
        check_layout(dest, image, f"{registry.host}/{REPO}:v1")
        assert any("range" in call.headers for call in registry.log)


def test_c11_12_two_processes_pull_into_one_layout(tmp_path: Path) -> None:
    image = small_image(3, size=100_000)
    with Registry() as registry:
        reference = f"{registry.host}/{REPO}:v1@{image.publish(registry, REPO)}"
        registry.faults = [on("GET", "blobs", lambda _q, r: replace(r, chunk=20_000))]
        command = [sys.executable, "-c", PULL, reference, str(tmp_path / "dest")]
        both = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.getcwd()}) for _ in range(2)]
        assert [p.wait(300) for p in both] == [0, 0]
        assert len({c.path for c in registry.calls("GET", "blobs")}) == len(registry.calls("GET", "blobs"))
        check_layout(tmp_path / "dest", image, f"{registry.host}/{REPO}:v1")


@needs_registry
@needs_openssl
@pytest.mark.parametrize("tls", [False, True])
def test_docker_registry_there_and_back_and_skopeo_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    image = small_image(3, size=200_000)
    made = make_certificates(tmp_path / "certificates")
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.authority))
    pair = (made.certificate, made.key) if tls else None
    with docker_registry(tmp_path / "registry", tls=pair) as registry:
        name = f"{registry.host}/{REPO}:v1"
        pushed = push(layout_of(image, tmp_path / "image"), name)
        pull(f"{name}@{pushed.manifest}", tmp_path / "dest", PullOptions(prove=True))
        check_layout(tmp_path / "dest", image, name)
    if shutil.which("skopeo"):
        source = f"oci:{tmp_path / 'dest'}:{name}"
        subprocess.run(["skopeo", "copy", source, f"dir:{tmp_path / 'copy'}"], check=True, capture_output=True)
