"""The Dockerfile is spec.json's image by other means (C12-09): every line by the spec, and the file system by buildah."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.settings import image_settings
from oci_builder.model.spec import RegistryBase, Spec, load_spec
from oci_builder.unpack import UnpackOptions, unpack_image
from tests.conftest import Built

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "Dockerfile"

# Paths that buildah itself makes or changes, with the reason. 1.28 has none in a build that runs nothing: even the times of
# folders are the archive's.
BUILDAHS_OWN: dict[str, str] = {}


def instructions() -> list[tuple[str, list[str]]]:
    """The Dockerfile as (word, arguments)."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    parts = [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined]
    return [(word, json.loads(rest) if rest.startswith("[") else shlex.split(rest)) for word, rest in parts]


def arguments(word: str) -> list[str]:
    """Of the only instruction of that name."""
    (found,) = [rest for name, rest in instructions() if name == word]
    return found


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec(ROOT / "spec.json")


@pytest.fixture(scope="module")
def config(spec: Spec) -> dict[str, Any]:
    """What our image's config says beyond its base's."""
    assert isinstance(spec.base, RegistryBase)
    settings, _ = image_settings(spec, {}, spec.base.registry, str(spec.base.manifest))
    run: dict[str, Any] = settings["config"]
    return run


def test_the_base_is_the_spec_s_by_digest(spec: Spec) -> None:
    assert isinstance(spec.base, RegistryBase)
    assert arguments("ARG") == [f"BASE={spec.base.registry}@{spec.base.digest}"]
    assert arguments("FROM") == ["${BASE}"]


def test_variables_labels_and_command_are_the_spec_s(config: dict[str, Any]) -> None:
    assert arguments("ENV") == config["Env"]
    assert dict(item.split("=", 1) for item in arguments("LABEL")) == config["Labels"]
    assert arguments("CMD") == config["Cmd"]


def test_nothing_else_is_set_and_nothing_is_run(config: dict[str, Any]) -> None:
    assert [word for word, _ in instructions()] == ["ARG", "FROM", "ADD", "ENV", "LABEL", "CMD"]
    assert set(config) == {"Env", "Labels", "Cmd"}
    assert arguments("ADD") == ["runtime.tar.gz", "/"]


class Buildah:
    """buildah with all its state in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, verb: str, *words: str | Path) -> str:
        """The last line that a command prints."""
        return (self.text(verb, *words).splitlines() or [""])[-1]

    def text(self, verb: str, *words: str | Path) -> str:
        """All that a command prints; it must end well."""
        state = ["--storage-driver", "vfs", "--root", f"{self.folder}/root", "--runroot", f"{self.folder}/run"]
        done = subprocess.run(
            ["buildah", *state, verb, *map(str, words)], capture_output=True, text=True, timeout=300,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def buildah() -> Iterator[Buildah]:
    if os.geteuid():
        pytest.skip("needs root: buildah keeps the owners of files")
    if shutil.which("buildah") is None:
        pytest.skip("not installed: buildah")
    folder = Path(tempfile.mkdtemp(prefix="ob-buildah-"))
    yield Buildah(folder)
    shutil.rmtree(folder)


def base_layout(built: Built, place: Path) -> None:
    """An OCI layout of an image's base alone."""
    subprocess.run(["tar", "-xf", built.oci, "-C", place], check=True)
    blobs = place / "blobs/sha256"
    row = next(layer for layer in built.container["layers"] if layer["from"] == "base")
    rootfs = {"type": "layers", "diff_ids": [row["diff_id"]]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}).encode()
    kind = "application/vnd.oci.image"
    layer = {"mediaType": row["media_type"], "digest": row["digest"], "size": row["size"]}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": f"{kind}.manifest.v1+json", "layers": [layer],
                           "config": described(blobs, config, f"{kind}.config.v1+json")}).encode()  # fmt: skip
    index = {"schemaVersion": 2, "manifests": [described(blobs, manifest, f"{kind}.manifest.v1+json")]}
    (place / "index.json").write_text(json.dumps(index))


def described(blobs: Path, data: bytes, kind: str) -> dict[str, Any]:
    """Store a blob; its descriptor."""
    name = hashlib.sha256(data).hexdigest()
    (blobs / name).write_bytes(data)
    return {"mediaType": kind, "digest": f"sha256:{name}", "size": len(data)}


def facts(root: Path) -> dict[str, tuple[Any, ...]]:
    """Path -> type, mode, owner, size or target, time, content and the names of the same file, of a whole tree."""
    names: dict[tuple[int, int], list[str]] = {}
    out: dict[str, tuple[Any, ...]] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder) / name
            found = path.lstat()
            names.setdefault((found.st_dev, found.st_ino), []).append(str(path.relative_to(root)))
            content: Any = None
            if path.is_symlink():
                content = os.readlink(path)
            elif stat.S_ISREG(found.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            xattrs = tuple((n, os.getxattr(path, n, follow_symlinks=False)) for n in sorted(os.listxattr(path, follow_symlinks=False)))
            when = int(found.st_mtime)
            out[str(path.relative_to(root))] = (oct(found.st_mode), found.st_uid, found.st_gid, when, content, xattrs)
    for same in names.values():
        for name in same:
            out[name] += (tuple(sorted(same)) if len(same) > 1 and not (root / name).is_dir() else (),)
    return out


@pytest.fixture(scope="module")
def both(runnable: Built, buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Facts of our image's tree and of buildah's, and buildah's config, from one portable archive and one base."""
    place = tmp_path_factory.mktemp("dockerfile")
    # buildah calls what it pulls by its path, and capitals in a temporary folder's name are no name of an image.
    base = Path(f"/tmp/ob-base-{secrets.token_hex(4)}")
    for folder in (place / "context", place / "ours", base):
        folder.mkdir()
    base_layout(runnable, base)
    shutil.copy(runnable.portable, place / "context/runtime.tar.gz")
    buildah("pull", f"oci:{base}:")
    shutil.rmtree(base)
    image = buildah("build", "--isolation", "chroot", "--build-arg", f"BASE={buildah('images', '-q')}", "--tag", "made",
                    "--file", DOCKERFILE, place / "context")  # fmt: skip
    container = buildah("from", "--pull-never", image or "made")
    theirs = facts(Path(buildah("mount", container)))
    config = json.loads(buildah.text("inspect", container))["OCIv1"]["config"]
    buildah("rm", container)
    unpack_image(runnable.oci, place / "ours", UnpackOptions())
    return facts(place / "ours"), theirs, config


@pytest.mark.interop
def test_the_file_systems_are_equal(both: tuple[dict[str, Any], ...]) -> None:
    ours, theirs, _ = both
    assert len(ours) > 500
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    shown = {name: (ours.get(name), theirs.get(name)) for name in different if name not in BUILDAHS_OWN}
    assert not shown, dict(list(shown.items())[:10])


@pytest.mark.interop
def test_the_links_of_the_payload_are_kept(both: tuple[dict[str, Any], ...]) -> None:
    """The archive's hard links and symbolic ones are the reason why the comparison means something."""
    _, theirs, _ = both
    assert theirs["opt/rt/envs/one/lib/pkg/own.py"][-1] == ("opt/rt/envs/one/lib/pkg/again.py", "opt/rt/envs/one/lib/pkg/own.py")
    assert theirs["opt/rt/envs/one/lib/link.py"][4] == "pkg/own.py"


@pytest.mark.interop
def test_buildah_reads_the_settings_as_they_are_meant(both: tuple[dict[str, Any], ...], config: dict[str, Any]) -> None:
    made = both[2]
    labels = {name: value for name, value in made["Labels"].items() if name != "io.buildah.version"}
    assert (sorted(made["Env"]), labels, made["Cmd"]) == (sorted(config["Env"]), config["Labels"], config["Cmd"])
