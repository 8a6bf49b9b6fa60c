"""Current clients read, name and run what we build: Apptainer 1.4, Docker 28 with both image stores, containerd 2.1,
skopeo 1.22, crane, podman 5, umoci 0.6.

They come from Debian unstable (clients.sh), so their versions move; what is asserted must hold for all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_builder.transports.daemon import load_into_engine
from tests.conftest import Built
from tests.interop.lab import (
    HELLO,
    SAYS,
    ULIMITS,
    Docker,
    Programs,
    containerd,
    docker_engine,
    podman_storage,
    short_folder,
)  # fmt: skip

pytestmark = [pytest.mark.interop, pytest.mark.slow]
# A cached conversion would hide a failure, and a home that Apptainer mounts can cover the interpreter.
APPTAINER = ("apptainer", "--quiet", "exec", "--disable-cache", "--no-home")


@pytest.fixture(scope="module", params=["classic", "containerd"])
def engine(modern: Programs, request: pytest.FixtureRequest) -> Iterator[tuple[str, Docker]]:
    """Docker Engine 28 with either image store."""
    with docker_engine(modern, containerd_store=request.param == "containerd") as docker:
        yield request.param, docker


@pytest.fixture
def layout(runnable: Built, tmp_path: Path) -> Path:
    """The OCI archive as a folder."""
    with tarfile.open(runnable.oci) as tar:
        tar.extractall(tmp_path / "layout", filter="data")
    return tmp_path / "layout"


def test_apptainer_runs_the_oci_archive(modern: Programs, runnable: Built) -> None:
    """B053-like reports: straight from the archive, its variables set."""
    image = f"oci-archive:{runnable.oci}"
    assert modern.run(*APPTAINER, image, HELLO) == SAYS
    said = modern.run(*APPTAINER, image, "python3", "-c", "import json, os, zlib; print(os.environ['LAB'])")
    assert said == "from the spec\n"


def test_apptainer_runs_as_an_ordinary_user(modern: Programs, runnable: Built) -> None:
    """As most people on a cluster run it: in a user namespace."""
    with short_folder() as folder:
        folder.chmod(0o755)
        copy, home = folder / "runtime.oci.tar", folder / "home"
        shutil.copyfile(runnable.oci, copy)
        home.mkdir()
        os.chown(home, 65534, 65534)
        as_user = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "env", f"HOME={home}",
                   f"APPTAINER_TMPDIR={home}", f"TMPDIR={home}", f"APPTAINER_CONFIGDIR={home}")  # fmt: skip
        assert modern.run(*as_user, *APPTAINER, f"oci-archive:{copy}", HELLO) == SAYS


@pytest.mark.parametrize("archive", ["docker", "oci"])
def test_docker_loads_names_and_runs_it(engine: tuple[str, Docker], runnable: Built, archive: str) -> None:
    """B025: the ID is the config's digest in one store and the manifest's in the other; both are foretold."""
    store, docker = engine
    docker.forget()
    path: Path = getattr(runnable, archive)
    docker.load(path)
    ids = runnable.container["image_ids"]
    expected = ids["classic"] if store == "classic" else ids["containerd"][path.name]
    assert docker.image_id(runnable.reference) == expected
    assert docker.execute(runnable.reference, HELLO) == SAYS


@pytest.mark.parametrize("archive", ["docker", "oci"])
def test_the_sdk_finds_the_foretold_image(engine: tuple[str, Docker], runnable: Built, archive: str) -> None:
    """As ``transports.daemon`` loads it, without a program; which store it is shows in the ID."""
    store, docker = engine
    docker.forget()
    path: Path = getattr(runnable, archive)
    loaded = load_into_engine(path, runnable.container, url=f"unix://{docker.socket}")
    ids = runnable.container["image_ids"]
    assert (loaded.store, loaded.reference) == (store, runnable.reference)
    assert loaded.image_id == (ids["classic"] if store == "classic" else ids["containerd"][path.name])


def test_skopeo_copies_both_archives(modern: Programs, runnable: Built, plain_docker: Path, tmp_path: Path) -> None:
    modern.run("skopeo", "copy", f"oci-archive:{runnable.oci}", f"dir:{tmp_path}/oci")
    modern.run("skopeo", "copy", f"docker-archive:{plain_docker}", f"dir:{tmp_path}/docker")
    named = [layer["digest"] for layer in json.loads((tmp_path / "oci/manifest.json").read_bytes())["layers"]]
    assert named == [layer["digest"] for layer in runnable.container["layers"]]


def test_crane_validates_both(modern: Programs, plain_docker: Path, runnable: Built) -> None:
    """crane derives every digest, size and diff_id again."""
    assert "PASS" in modern.run("crane", "validate", "--tarball", plain_docker)
    assert "PASS" in modern.run("crane", "validate", "--tarball", runnable.oci)


def test_umoci_unpacks_it(modern: Programs, layout: Path, tmp_path: Path) -> None:
    index = json.loads((layout / "index.json").read_bytes())
    index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"] = "t1"
    (layout / "index.json").write_text(json.dumps(index))
    modern.run("umoci", "unpack", "--image", f"{layout}:t1", tmp_path / "bundle")
    assert (tmp_path / "bundle/rootfs/opt/rt/envs/one/lib/pkg/own.py").read_text() == SAYS


def test_podman_loads_names_and_runs_it(modern: Programs, runnable: Built) -> None:
    with podman_storage(modern) as storage:
        podman, name = ("podman", *storage), f"docker.io/{runnable.reference}"
        modern.run(*podman, "load", "-i", runnable.oci)
        assert (
            "sha256:" + modern.run(*podman, "image", "inspect", "-f", "{{.Id}}", name).strip()
            == (runnable.container["image_ids"]["classic"])
        )
        said = modern.run(*podman, "run", *ULIMITS, "--rm", "--pull", "never", "--network", "none", name, HELLO)
        assert said == SAYS


def test_containerd_imports_names_and_runs_it(modern: Programs, runnable: Built) -> None:
    name = f"docker.io/{runnable.reference}"
    with containerd(modern) as ctr, short_folder() as fifos:
        modern.run(*ctr, "images", "import", runnable.oci)
        assert runnable.container["manifest"]["digest"] in modern.run(*ctr, "images", "ls", f"name=={name}")
        assert modern.run(*ctr, "run", "--rm", "--fifo-dir", fifos, name, "lab", HELLO) == SAYS
