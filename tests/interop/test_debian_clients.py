"""Debian 12's own clients read, name and run what we build.

Docker 20.10, podman 4.3, buildah 1.28, skopeo 1.9, umoci 0.4.

Field reports of groups A and B: no client may need a flag, a conversion or a second look to accept an archive.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from oci_builder.unpack import unpack_image
from tests.conftest import Built
from tests.interop.conftest import need
from tests.interop.lab import HELLO, SAYS, ULIMITS, Docker, Programs, podman_storage

pytestmark = pytest.mark.interop
PYTHON = "import hashlib, json, os, sys, zlib; print(json.dumps([os.environ['LAB'], os.getcwd()]))"


@pytest.mark.parametrize("archive", ["docker", "oci"])
def test_docker_loads_names_and_runs_it(engine: Docker, runnable: Built, archive: str) -> None:
    """B010, B025: by the right name, with the foretold ID, and its programs run."""
    engine.forget()
    assert runnable.reference in engine.load(getattr(runnable, archive))
    assert engine.image_id(runnable.reference) == runnable.container["image_ids"]["classic"]
    assert engine.execute(runnable.reference, HELLO) == SAYS
    assert json.loads(engine.execute(runnable.reference, "python3", "-c", PYTHON)) == ["from the spec", "/opt/rt"]


def test_docker_keeps_what_the_spec_says(engine: Docker, runnable: Built) -> None:
    engine.load(runnable.docker)
    config = json.loads(engine("image", "inspect", runnable.reference))[0]
    assert config["Config"]["Labels"]["lab.label"] == "kept"
    assert config["Config"]["WorkingDir"] == "/opt/rt"
    assert config["RootFS"]["Layers"] == runnable.container["diff_ids"]
    assert config["Created"] == "2023-11-14T22:13:20Z"


def test_docker_shows_hard_links_as_one_file(engine: Docker, runnable: Built) -> None:
    """Shared content is a hard-link group inside one layer; overlayfs must show it so."""
    engine.load(runnable.docker)
    paths = [f"/opt/rt/envs/{tier}/lib/pkg/shared.bin" for tier in ("one", "two")]
    one, two = engine.execute(runnable.reference, "stat", "-c", "%i %h %s", *paths).splitlines()
    assert one == two and one.split()[1:] == ["2", str(256 * 4096)]


def test_docker_loads_both_archives_as_one_image(engine: Docker, runnable: Built) -> None:
    engine.forget()
    engine.load(runnable.oci)
    engine.load(runnable.docker)
    assert len(engine("image", "ls", "-aq").split()) == 1


def test_skopeo_sees_the_manifest_that_we_wrote(debian: Programs, runnable: Built) -> None:
    need("skopeo")
    raw = debian.run("skopeo", "inspect", "--raw", f"oci-archive:{runnable.oci}")
    assert "sha256:" + hashlib.sha256(raw.encode()).hexdigest() == runnable.container["manifest"]["digest"]
    config = debian.run("skopeo", "inspect", "--config", "--raw", f"oci-archive:{runnable.oci}")
    assert "sha256:" + hashlib.sha256(config.encode()).hexdigest() == runnable.container["config"]["digest"]


def test_skopeo_copies_both_archives(debian: Programs, runnable: Built, plain_docker: Path, tmp_path: Path) -> None:
    """The copies hold our layers: skopeo verifies each blob on the way. It reads no gzip around an archive."""
    need("skopeo")
    debian.run("skopeo", "copy", f"oci-archive:{runnable.oci}", f"dir:{tmp_path}/oci")
    debian.run("skopeo", "copy", f"docker-archive:{plain_docker}", f"dir:{tmp_path}/docker")
    named = [layer["digest"] for layer in json.loads((tmp_path / "oci/manifest.json").read_bytes())["layers"]]
    assert named == [layer["digest"] for layer in runnable.container["layers"]]
    plain = [layer["digest"] for layer in json.loads((tmp_path / "docker/manifest.json").read_bytes())["layers"]]
    assert plain == runnable.container["diff_ids"]


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """What a file system holds: kind and mode, owner, time, link or content's digest."""
    out: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            stat = path.lstat()
            content: object = ""
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = (hashlib.sha256(path.read_bytes()).hexdigest(), stat.st_nlink)
            out[str(path.relative_to(root))] = (stat.st_mode, stat.st_uid, stat.st_gid, int(stat.st_mtime), content)
    return out


def test_umoci_unpacks_the_tree_that_we_unpack(debian: Programs, runnable: Built, tmp_path: Path) -> None:
    """C12-02 by a second program: types, modes, owners, times, links and content are equal."""
    need("skopeo", "umoci")
    debian.run("skopeo", "copy", f"oci-archive:{runnable.oci}", f"oci:{tmp_path}/layout:t1")
    debian.run("umoci", "unpack", "--image", f"{tmp_path}/layout:t1", tmp_path / "bundle")
    unpack_image(runnable.oci, tmp_path / "ours")
    theirs, ours = tree(tmp_path / "bundle/rootfs"), tree(tmp_path / "ours")
    assert len(ours) > 500
    assert ours == theirs
    for name in ("layout", "bundle", "ours"):
        shutil.rmtree(tmp_path / name)


@pytest.mark.parametrize("archive", ["oci", "docker"])
def test_podman_loads_names_and_runs_it(debian: Programs, runnable: Built, plain_docker: Path, archive: str) -> None:
    need("podman", "runc")
    with podman_storage(debian) as storage:
        podman = ("podman", *storage)
        debian.run(*podman, "load", "-i", runnable.oci if archive == "oci" else plain_docker)
        name = f"docker.io/{runnable.reference}"
        ids = debian.run(*podman, "image", "inspect", "-f", "{{.Id}}", name).strip()
        said = debian.run(*podman, "run", *ULIMITS, "--rm", "--pull", "never", "--network", "none", name, HELLO)
        assert ("sha256:" + ids, said) == (runnable.container["image_ids"]["classic"], SAYS)


def test_buildah_works_on_top_of_it(debian: Programs, runnable: Built) -> None:
    need("buildah", "podman")
    with podman_storage(debian) as storage:
        buildah = ("buildah", *storage)
        debian.run("podman", *storage, "load", "-i", runnable.oci)
        debian.run(*buildah, "from", "--pull-never", "--name", "work", f"docker.io/{runnable.reference}")
        try:
            assert debian.run(*buildah, "run", "--isolation", "chroot", "work", HELLO) == SAYS
        finally:
            debian.call(*buildah, "rm", "-a")
