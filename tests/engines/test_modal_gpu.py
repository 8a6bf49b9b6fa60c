"""GPU stages through ``modal run`` on the stand-in, as far as they go without a GPU: the image's own step really installs
the archive from the volume, the container has a CUDA driver of our own making, no network, and the runtime's checks run.
What CUDA itself would have to do fails, and the receipt says so; nothing of it meets a gate.

Each test is one step; those before it must have passed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("modal", reason="needs the extra 'modal'")

from oci_builder.engines.modal_container import ARCHIVE, RUNTIME
from oci_builder.model.receipts import PORTABLE
from tests.engines.modal_lab import Lab
from tests.engines.test_local_limits import DRIVER, driver
from tests.engines.test_stages_gpu import PYTHON, SHIPPED
from tests.lab.envelopes import statement_of
from tests.lab.modal_plane_client import ROOT, Ran, RunningPlane, bare_python, why_not
from tests.lab.modal_plane_project import GATES, LAYER, make_project

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
]
B200 = {"name": "B200", "capability": "10.0"}
GPU_GATES = [
    {"name": "single", "stage": "single", "checks": ["training"], "hardware": {**B200, "count": 1}},
    {"name": "nccl8", "stage": "nccl8", "checks": ["nccl"], "hardware": {**B200, "count": 8}, "os": ["ubuntu 22.04"]},
]  # fmt: skip


class Release(Lab):
    """A release whose tiers have this machine's Python, and which ships the project's own checks."""

    def __init__(self, folder: Path) -> None:
        plane = RunningPlane(folder / "plane", bare_python(folder / "python"))
        super().__init__(plane, make_project(folder / "project", plane))
        home = self.project.spec.parent
        for name in SHIPPED:
            source, target = ROOT / "layers/files" / name, home / "layers/files" / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)
        entries = "".join(f'[[file]]\nfrom = "files/{n}"\nto = "{n}"\n' for n in SHIPPED if f'to = "{n}"' not in LAYER)
        (home / "layers/runtime.toml").write_text(LAYER + entries)
        spec = json.loads(self.project.spec.read_text())
        self.project.spec.write_text(json.dumps({**spec, "base": {"scratch": True}, "gates": [*GATES[:2], *GPU_GATES]}))
        for tier in ("one", "two"):
            python = self.volume / "tiers/envs" / tier / "bin/python3"
            python.write_text(PYTHON)
            python.chmod(0o755)
        (folder / "driver").mkdir()
        driver(folder / "driver", DRIVER.replace("*n = 2", "*n = 8"))
        self.there = {"build": True, "driver": str(folder / "driver")}

    @property
    def archive(self) -> Path:
        return self.volume / "dist" / self.project.release.name / PORTABLE

    def run(self, script: str, name: str) -> Ran:
        """``modal run SCRIPT --stage NAME``, on machines with GPUs."""
        self.plane.faults(**self.there)
        return self.plane.run("run", script, "--stage", name, *self.project.words)

    def predicate(self, stage: str) -> dict[str, Any]:
        """What the one receipt of a stage says."""
        (path,) = (self.project.release / "receipts").glob(f"{stage}-2*.json")
        statement = statement_of(path)
        assert [s["name"] for s in statement["subject"]] == [PORTABLE]
        found: dict[str, Any] = statement["predicate"]
        return found


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    made = Release(tmp_path_factory.mktemp("gpu"))
    try:
        yield made
    finally:
        made.plane.stop()


def outcomes(predicate: dict[str, Any]) -> dict[str, str]:
    return {c["name"]: c["outcome"] for c in predicate["checks"]}


def test_01_the_archives(release: Release) -> None:
    for stage in ("package", "container"):
        ran = release.run("modal_build.py", stage)
        assert ran.status == 0, ran.text


def test_02_an_archive_that_is_not_the_recorded_one_is_never_an_image(release: Release) -> None:
    """The installer in the image's recipe compares it; nothing runs on a GPU that is paid for."""
    whole, before = release.archive.read_bytes(), release.plane.mark
    release.archive.write_bytes(whole[:-1] + b"x")
    try:
        ran = release.run("modal_qualify.py", "single")
    finally:
        release.archive.write_bytes(whole)
    assert (ran.status, ran.err.count("error[modal.image]")) == (5, 1), ran.text
    assert "sha256" in ran.text.lower(), "the installer's own words are in the log above"
    assert release.plane.events("container", before) == []


def test_03_single_installs_the_archive_and_runs_the_runtime_s_checks(release: Release) -> None:
    before = release.plane.mark
    ran = release.run("modal_qualify.py", "single")
    assert (ran.status, "single: fail (fake)" in ran.out) == (1, True), ran.text
    assert [e["status"] for e in release.plane.events("build", before)] == [0]
    found = release.predicate("single")
    said = outcomes(found)
    assert {"relocation", "jit", "training", "imports:one", "imports:two"} <= set(said)
    assert {said[name] for name in ("network-blocked", "caches-empty")} == {"pass"}
    assert said["training"] == "fail", "there is no CUDA behind that driver"
    assert "pass" not in {said[name] for name in ("jit", "relocation")}
    assert (found["engine"], found["host"]["os"]) == ("fake", "ubuntu 22.04")
    assert {g["name"] for g in found["host"]["gpus"]} == {"NVIDIA B200"}
    assert found["details"]["modal"]["fresh"] is True
    # GPU stages have no volume, and their disk goes with the machine: the logs come back.
    kept = next(line for line in ran.err.splitlines() if line.startswith("kept for diagnosis: ")).partition(": ")[2]
    assert {"checks.log", "install.log"} <= {p.name for p in Path(kept).iterdir() if p.stat().st_size}
    shutil.rmtree(kept)


def test_04_nccl_fails_and_the_second_ubuntu_is_not_tried(release: Release) -> None:
    """The archive is installed once: Modal keeps the image, whose recipe names it."""
    before = release.plane.mark
    ran = release.run("modal_qualify.py", "nccl8")
    assert (ran.status, "nccl8: fail (fake)" in ran.out) == (1, True), ran.text
    assert [e["function"] for e in release.plane.events("container", before)] == ["nccl8"]
    assert release.plane.events("build", before) == []
    found = release.predicate("nccl8")
    assert outcomes(found) == {"network-blocked": "pass", "caches-empty": "pass", "nccl": "fail"}
    assert [g["name"] for g in found["host"]["gpus"]] == ["NVIDIA B200"] * 8


def test_05_the_second_ubuntu_alone_wants_the_first_s_receipt(release: Release) -> None:
    before = release.plane.mark
    ran = release.run("modal_qualify.py", "nccl8-u24")
    assert (ran.status, ran.err.count("error[stage.first]")) == (4, 1), ran.text
    assert release.plane.events("function", before) == []


def test_06_qualification_counts_none_of_it(release: Release) -> None:
    ran = release.run("modal_build.py", "qualification")
    assert ran.status == 0, ran.text
    verdict = json.loads((release.project.release / "qualification.json").read_text())
    assert verdict["state"] == "candidate"
    states = {gate["name"]: gate["state"] for gate in verdict["gates"]}
    assert states["nccl8"] != "met" and states["single"] != "met"


def test_07_nothing_was_left_on_this_machine(release: Release) -> None:
    assert [p for p in (Path(RUNTIME), Path(ARCHIVE).parent) if p.exists()] == []
    assert release.plane.events("unknown") == []
