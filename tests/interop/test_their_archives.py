"""Archives that current programs write: verify accepts them, and unpack finds the image in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_builder.model.errors import FormatError
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.verify import verify_archives
from tests.interop.lab import Docker, Programs, docker_engine, podman_storage
from tests.lab.archives import OCI, Lab, descriptor, dump, files, sha, tar, write, write_layout
from tests.lab.archives import entry as item
from tests.lab.dockerregistry import docker_registry, needs_registry

pytestmark = [pytest.mark.interop, pytest.mark.root]

ONE = Lab([files(one=b"1" * 200_000), files(both=b"b")], name="lab/one:1")
TWO = Lab([files(two=b"2"), files(both=b"b")], name="lab/two:1")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def accept(archive: Path, folder: Path, wanted: list[str], image: str = "") -> None:
    """Good, and this image."""
    report = verify_archives([archive])
    assert report.ok, report.errors
    unpack_image(archive, folder, UnpackOptions(image=image))
    assert names(folder) == wanted


@pytest.fixture(scope="module", params=[False, True], ids=["classic", "containerd"])
def docker(modern: Programs, request: pytest.FixtureRequest) -> Iterator[Docker]:
    with docker_engine(modern, containerd_store=request.param) as engine:
        yield engine


@pytest.fixture
def loaded(docker: Docker, tmp_path: Path) -> Docker:
    for name, lab in (("one", ONE), ("two", TWO)):
        docker.load(write(tmp_path / f"{name}.tar", lab.oci()))
    return docker


def test_docker_save_of_one_image(loaded: Docker, tmp_path: Path) -> None:
    loaded("save", "-o", tmp_path / "saved.tar", "lab/one:1")
    accept(tmp_path / "saved.tar", tmp_path / "out", ["both", "one"])
    packed = tmp_path / "saved.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "saved.tar").read_bytes()))
    accept(packed, tmp_path / "out.gz", ["both", "one"])


@pytest.mark.parametrize("compress", [False, True])
def test_docker_save_of_two_images(loaded: Docker, tmp_path: Path, compress: bool) -> None:
    """index.json has two, manifest.json has two: good, and each can be had by its name."""
    saved = tmp_path / "saved.tar"
    loaded("save", "-o", saved, "lab/one:1", "lab/two:1")
    if compress:
        saved.write_bytes(gzip.compress(saved.read_bytes()))
    accept(saved, tmp_path / "one", ["both", "one"], "lab/one:1")
    accept(saved, tmp_path / "two", ["both", "two"], "docker.io/lab/two:1")
    with pytest.raises(FormatError) as error:
        unpack_image(saved, tmp_path / "no")
    assert error.value.code == "platform.ambiguous" and "lab/two:1" in error.value.message


def test_docker_save_by_id(loaded: Docker, tmp_path: Path) -> None:
    ids = [loaded.image_id(lab.name) for lab in (ONE, TWO)]
    loaded("save", "-o", tmp_path / "one.tar", ids[0])
    accept(tmp_path / "one.tar", tmp_path / "out", ["both", "one"])
    loaded("save", "-o", tmp_path / "saved.tar", *ids)
    # The classic store's fault: index.json keeps one image for each name, and these have none; manifest.json has both.
    assert {f.code for f in verify_archives([tmp_path / "saved.tar"]).errors} <= {"archive.views"}


def test_docker_save_of_two_names(loaded: Docker, tmp_path: Path) -> None:
    loaded("tag", "lab/one:1", "lab/other:2")
    loaded("save", "-o", tmp_path / "saved.tar", "lab/one:1", "lab/other:2")
    accept(tmp_path / "saved.tar", tmp_path / "out", ["both", "one"])
    accept(tmp_path / "saved.tar", tmp_path / "named", ["both", "one"], "lab/other:2")


@pytest.mark.parametrize("how", ["gzip", "zstd", "zstd:chunked"])
@pytest.mark.parametrize("form", ["oci:{}:r1", "oci-archive:{}:r1"])
def test_skopeo_of_today(modern: Programs, tmp_path: Path, how: str, form: str) -> None:
    source = write(tmp_path / "one.tar", ONE.oci())
    target = form.format(tmp_path / "copy")
    modern.run("skopeo", "copy", "--dest-compress-format", how, "--dest-force-compress-format", f"oci-archive:{source}", target)
    accept(tmp_path / "copy", tmp_path / "out", ["both", "one"])


def test_skopeo_copies_every_platform(modern: Programs, tmp_path: Path) -> None:
    """All of an index, and one of it with the others' blobs left out (a sparse layout)."""
    arm = Lab([files(arm=b"a")], platform=("linux", "arm64"))
    parts = [lab.oci() for lab in (ONE, arm)]
    index = json.loads(parts[0]["index.json"])
    index["manifests"] = [json.loads(part["index.json"])["manifests"][0] for part in parts]
    members = {**parts[0], **parts[1], "index.json": json.dumps(index).encode()}
    del members["manifest.json"]
    members["blobs/sha256/" + sha(members["index.json"])] = inner = members["index.json"]
    members["index.json"] = dump({**index, "manifests": [descriptor(OCI + "index.v1+json", inner)]})
    source = write_layout(tmp_path / "source", members)
    modern.run("skopeo", "copy", "--all", f"oci:{source}", f"oci:{tmp_path / 'all'}:r1")
    accept(tmp_path / "all", tmp_path / "out", ["both", "one"])
    sparse = ("--multi-arch", "index-only")
    modern.run("skopeo", "copy", *sparse, f"oci:{source}", f"oci:{tmp_path / 'index'}:r1")
    assert not verify_archives([tmp_path / "index"]).ok, "nothing of the platform that is asked for is there"


def test_crane_append_and_its_layout(modern: Programs, tmp_path: Path) -> None:
    """No history, a base of nothing; as a Docker archive and pulled as a layout."""
    layer = tmp_path / "layer.tar"
    layer.write_bytes(tar(item("one", b"1"), item("both", b"b")))
    modern.run("crane", "append", "--oci-empty-base", "-f", layer, "-t", "lab/one:1", "-o", tmp_path / "made.tar")
    report = verify_archives([tmp_path / "made.tar"])
    assert {f.code for f in report.errors} <= {"config.platform", "platform.missing"}, report.errors


@pytest.fixture
def pushed(modern: Programs, tmp_path: Path) -> Iterator[str]:
    """Repository of an image of two layers that crane made of tars; the upper one is in estargz."""
    (tmp_path / "one.tar").write_bytes(tar(item("one", b"1")))
    (tmp_path / "both.tar.gz").write_bytes(gzip.compress(tar(item("both", b"b"))))
    with docker_registry(tmp_path / "registry") as registry:
        place = f"{registry.host}/lab/one"
        modern.run("crane", "append", "--oci-empty-base", "-f", tmp_path / "one.tar", "-t", f"{place}:base")
        modern.run("env", "GGCR_EXPERIMENT_ESTARGZ=1", "crane", "mutate", "--set-platform", "linux/amd64",
                   "--append", tmp_path / "both.tar.gz", "-t", f"{place}:1", f"{place}:base")  # fmt: skip
        yield f"{place}:1"


@needs_registry
@pytest.mark.parametrize("form", ["tarball", "legacy", "oci"])
def test_crane_pull_with_estargz(modern: Programs, pushed: str, tmp_path: Path, form: str) -> None:
    """Also the form of apko's archives: a config called sha256:HEX, layers called HEX.tar.gz."""
    modern.run("crane", "pull", "--format", form, pushed, tmp_path / "pulled")
    accept(tmp_path / "pulled", tmp_path / "out", [".no.prefetch.landmark", "both", "one", "stargz.index.json"])


@needs_registry
def test_crane_export_is_a_tree_and_no_archive(modern: Programs, pushed: str, tmp_path: Path) -> None:
    modern.run("crane", "export", pushed, tmp_path / "tree.tar")
    assert {f.code for f in verify_archives([tmp_path / "tree.tar"]).errors} == {"archive.missing"}
    with pytest.raises(FormatError) as error:
        unpack_image(tmp_path / "tree.tar", tmp_path / "out")
    assert error.value.code == "archive.missing" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["gzip", "zstd", "zstd:chunked"])
def test_buildah_push(modern: Programs, tmp_path: Path, how: str) -> None:
    (tmp_path / "both.tar").write_bytes(tar(item("both", b"b")))
    with podman_storage(modern) as storage:
        buildah = ("buildah", *storage, "--storage-driver", "vfs")
        work = modern.run(*buildah, "from", "scratch").strip()
        modern.run(*buildah, "add", work, tmp_path / "both.tar", "/")
        modern.run(*buildah, "commit", work, "lab/one:1")
        packed = ("--compression-format", how, "--force-compression")
        for more, target in ((packed, "oci-archive"), (packed, "oci"), ((), "docker-archive")):
            made = tmp_path / target
            modern.run(*buildah, "push", *more, "lab/one:1", f"{target}:{made}:lab/one:1")
            accept(made, tmp_path / f"out-{target}", ["both"])
        modern.run(*buildah, "push", "lab/one:1", f"dir:{tmp_path / 'dir'}")
    found = verify_archives([tmp_path / "dir"]).errors
    assert [f.code for f in found] == ["json.field"] and "copy that to oci:" in found[0].message
