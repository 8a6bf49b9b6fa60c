"""What each stage asks Modal for: by the client's own ``Function.info()``, and by what reaches the control plane."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("modal", reason="needs the extra 'modal'")

import modal

from oci_builder.engines import modal_app
from oci_builder.engines.modal_app import RUNTIME, bind, image_of
from oci_builder.engines.stages import STAGES
from oci_builder.model.errors import SpecError
from oci_builder.model.spec import Spec, parse_spec
from tests.lab.modal_plane_client import ROOT, RunningPlane

SHA = "ab" * 32
MINUTE = 60
# stage -> (minutes, stays, network, GPUs, image family)
WANTED = {
    "build": (180, False, True, [], "build-u22"),
    "package": (120, False, True, [], "build-u22"),
    "container": (90, True, False, [], "build-u22"),
    "container-check": (60, False, False, [], "build-u22"),
    "single": (60, False, False, [("B200", 1)], "check-u22"),
    "nccl8": (60, False, False, [("B200", 8)], "check-u22"),
    "nccl8-u24": (60, False, False, [("B200", 8)], "check-u24"),
    "qualification": (10, False, False, [], "build-u22"),
    "repack": (60, False, False, [], "repack"),
    "publish": (60, True, True, [], "build-u22"),
}
DRIVER = """
import sys
from pathlib import Path
import modal
from oci_builder.engines import modal_app
from oci_builder.engines.stages import STAGES
from oci_builder.model.spec import load_spec
sha, folder = sys.argv[1], Path(sys.argv[2])
spec, inputs = load_spec(folder / "spec.json"), folder / "inputs.tar"
for name in sys.argv[3:]:
    stage = STAGES[name]
    portable = sha if stage.needs.image.startswith("check") else ""
    app = modal.App(modal_app.APPS[stage.needs.image], include_source=False)
    modal_app.bind(app, stage, modal_app.image_of(stage.needs, spec, inputs, "r1", portable))
    with app.run():
        pass
"""


def spec(**changes: Any) -> Spec:
    value = {
        "name": "x", "tag": "t", "prefix": "/opt/rt", "tiers": {"one": {"path": "/vol/one"}},
        "base": {"registry": "docker.io/nvidia/cuda:13.0.2-devel-ubuntu22.04", "digest": f"sha256:{SHA}"}, **changes,
    }  # fmt: skip
    return parse_spec(json.dumps(value).encode())


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NRL_REPACK_IMAGE_ID", "im-frozen")
    (tmp_path / "inputs.tar").write_bytes(b"x")
    (tmp_path / "ensure_runtime.sh").write_bytes(b"x")
    return tmp_path / "inputs.tar"


def test_the_table_has_every_stage() -> None:
    assert set(WANTED) == set(STAGES)


@pytest.mark.parametrize("name", WANTED)
def test_the_client_s_own_account_of_a_function(name: str, inputs: Path) -> None:
    stage = STAGES[name]
    minutes, stays, network, gpus, family = WANTED[name]
    app = modal.App("x", include_source=False)
    info = bind(app, stage, image_of(stage.needs, spec(), inputs, "r1", SHA)).info()
    assert stage.needs.image == family
    assert info.timeout == minutes * MINUTE
    assert info.nonpreemptible is stays
    assert [tuple(g) for g in info.gpus or []] == gpus
    assert info.max_retries in (None, 0)
    assert (info.block_network, info.restrict_modal_access) == (not network, not network)
    assert info.single_use_containers is True
    assert (info.cpu, info.memory_mib) == (stage.needs.cpu, stage.needs.memory_mib)
    assert {mount: v.name for mount, v in (info.volumes or {}).items()} == dict(stage.needs.volumes)
    assert info.ephemeral_disk_mib is None, "Modal gives 512 GiB to everybody"


class Seen:
    """What reached the control plane for every stage."""

    def __init__(self, plane: RunningPlane) -> None:
        self.functions = {e["name"]: e for e in plane.events("function")}
        self.images = {e["id"]: e for e in plane.events("image")}
        self.volumes = {e["name"]: e for e in plane.events("volume")}
        self.apps = [e["name"] for e in plane.events("app")]
        self.frozen = [e["id"] for e in plane.events("image_from_id")]

    def recipe(self, stage: str) -> str:
        """All steps of a stage's image, first to last."""
        steps: list[str] = []
        image: str = self.functions[stage]["image"]
        while image in self.images:
            steps = [*self.images[image]["commands"], *steps]
            image = next(iter(self.images[image]["base"]), "")
        return "\n".join(steps)


def drive(plane: RunningPlane, folder: Path, sha: str, *names: str, **changes: Any) -> None:
    (folder / "spec.json").write_bytes(spec(**changes).canonical())
    (folder / "inputs.tar").write_bytes(b"inputs")
    (folder / "ensure_runtime.sh").write_bytes(b"installer")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, sha, str(folder), *names], cwd=ROOT, capture_output=True, text=True,
        env=plane.env(NRL_REPACK_IMAGE_ID="im-frozen"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlane]:
    plane = RunningPlane(tmp_path_factory.mktemp("plane"), Path(sys.executable))
    plane.faults(images=["im-frozen"], secrets={"huggingface": {}, "oci-builder-key": {}})
    try:
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="module")
def seen(plane: RunningPlane, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    drive(plane, tmp_path_factory.mktemp("sender"), SHA, *WANTED)
    return Seen(plane)


@pytest.mark.parametrize("name", WANTED)
def test_what_reaches_the_control_plane(name: str, seen: Seen) -> None:
    minutes, stays, network, gpus, _ = WANTED[name]
    got = seen.functions[name]
    assert got["timeout"] == minutes * MINUTE
    assert (got["nonpreemptible"], got["block_network"], got["no_modal_access"]) == (stays, not network, not network)
    assert (got["gpu"], got["gpus"]) == (gpus[0] if gpus else ("", 0))
    assert got["retries"] is None, "no policy: an error of the stage is final"
    assert got["single_use"] is True
    assert got["milli_cpu"] == STAGES[name].needs.cpu * 1000
    assert got["memory_mib"] == STAGES[name].needs.memory_mib
    assert got["module"] == "oci_builder.engines.modal_app"
    assert {"/root/oci_builder/engines/run.py", "/root/chroot_exec/runner.py", "/oci-builder/inputs.tar"} <= set(got["files"])


def test_stages_on_gpus_have_no_volume_and_no_secret(seen: Seen) -> None:
    for name in ("single", "nccl8", "nccl8-u24"):
        assert (seen.functions[name]["volumes"], seen.functions[name]["secrets"]) == ({}, 0)


def test_the_volume_is_of_version_2_and_writable(seen: Seen) -> None:
    """uv links the tiers from one cache; version 1 has no hard links."""
    assert {v["asked"] for v in seen.volumes.values()} == {2}
    assert seen.functions["build"]["volumes"] == {"/vol": ["oci-builder", False]}


def test_only_stages_that_sign_or_publish_get_secrets(seen: Seen) -> None:
    """Repack's second one is the frozen image's id: ``env`` of a function is a secret to Modal."""
    got = {name: f["secrets"] for name, f in seen.functions.items() if f["secrets"]}
    assert got == {"container": 1, "publish": 2, "repack": 2}


def test_one_app_for_each_family(seen: Seen) -> None:
    assert dict(zip(WANTED, seen.apps, strict=True)) == {
        **dict.fromkeys(WANTED, "oci-builder-build"), **dict.fromkeys(("single", "nccl8", "nccl8-u24"), "oci-builder-qualify"),
        "repack": "oci-builder-repack",
    }  # fmt: skip


def test_repack_runs_on_the_frozen_image_itself(seen: Seen) -> None:
    assert seen.frozen == ["im-frozen"]
    assert seen.functions["repack"]["image"] == "im-frozen"


def test_the_build_image_starts_from_the_spec_s_pinned_base(seen: Seen) -> None:
    first = seen.recipe("build").splitlines()[0]
    assert first == f"FROM docker.io/nvidia/cuda@sha256:{SHA}"


def test_a_base_without_a_registry_builds_on_plain_ubuntu(inputs: Path) -> None:
    image = image_of(STAGES["build"].needs, spec(base={"scratch": True}), inputs)
    assert isinstance(image, modal.Image)


@pytest.mark.parametrize(("name", "start"), [("single", "ubuntu:22.04"), ("nccl8", "ubuntu:22.04"), ("nccl8-u24", "ubuntu:24.04")])
def test_hosts_are_plain_ubuntu_with_the_archive_installed(name: str, start: str, seen: Seen) -> None:
    lines = seen.recipe(name).splitlines()
    assert lines[0] == f"FROM {start}"
    assert lines[-1].endswith(f"ensure_runtime.sh /vol/dist/r1/runtime.tar.gz {SHA} {RUNTIME}")


def test_another_archive_is_another_image_on_the_same_steps_before(plane: RunningPlane, seen: Seen, tmp_path: Path) -> None:
    drive(plane, tmp_path, "cd" * 32, "single")
    other = Seen(plane).functions["single"]["image"]
    images = Seen(plane).images
    assert other != seen.functions["single"]["image"]
    assert images[other]["base"] == images[seen.functions["single"]["image"]]["base"]


def test_the_same_archive_is_the_same_image(plane: RunningPlane, seen: Seen, tmp_path: Path) -> None:
    before = plane.mark
    drive(plane, tmp_path, SHA, "single")
    assert plane.events("image", before) == []


def test_repack_wants_an_image_id(monkeypatch: pytest.MonkeyPatch, inputs: Path) -> None:
    for wrong in ("", "im-", "im-x; rm", "nvidia/cuda"):
        monkeypatch.setenv("NRL_REPACK_IMAGE_ID", wrong)
        with pytest.raises(SpecError) as error:
            image_of(STAGES["repack"].needs, spec(), inputs)
        assert error.value.code == "modal.frozen"


@pytest.mark.parametrize("found", ["1.5.5", "1.7.0", "2.0"])
def test_a_client_of_another_series_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modal_app.metadata, "version", lambda _name: found)
    with pytest.raises(SpecError) as error:
        modal_app.check_client()
    assert error.value.code == "modal.version"


def test_packages_are_those_of_the_project() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)}
    wanted = {f"{name}{allowed}" for name, allowed in {**modal_app.PACKAGES, **modal_app.BUILD_PACKAGES}.items()}
    assert wanted <= known
    assert set(project["dependencies"]) <= wanted
