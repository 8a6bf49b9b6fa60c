"""A whole release through ``modal run``: the real client and container runtime, on the control plane's stand-in.

Each test is one step, in the order of a release; those before it must have passed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("modal", reason="needs the extra 'modal'")

from oci_builder.model.receipts import DOCKER, OCI, PORTABLE
from tests.lab.envelopes import statement_of
from tests.lab.modal_plane_client import Ran, RunningPlane, bare_python, why_not
from tests.lab.modal_plane_project import CHECKS, VOLUME, Project, make_project

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
]


class Release:
    """The stand-in, the project, and its folders."""

    def __init__(self, plane: RunningPlane, project: Project) -> None:
        self.plane, self.project = plane, project
        self.image = ""

    def stage(self, script: str, name: str, *words: str, **env: str) -> Ran:
        return self.plane.run("run", "-q", script, "--stage", name, *self.project.words, *words, **env)

    @property
    def dist(self) -> Path:
        return self.plane.volume(VOLUME) / "dist" / self.project.release.name

    def recorded(self) -> str:
        """SHA-256 of the portable archive, as the sender's release folder says."""
        return str(json.loads((self.project.release / "portable.json").read_text())["sha256"])

    def receipt(self, stage: str) -> dict[str, Any]:
        """The newest receipt of a stage: its statement."""
        found = (self.project.release / "receipts").glob(f"{stage}-2*.json")
        return statement_of(max(found, key=lambda path: path.stat().st_mtime))


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    folder = tmp_path_factory.mktemp("modal")
    plane = RunningPlane(folder / "plane", bare_python(folder / "python"))
    try:
        yield Release(plane, make_project(folder / "project", plane))
    finally:
        plane.stop()


def test_01_build_makes_the_tiers_on_the_volume(release: Release) -> None:
    ran = release.stage("modal_build.py", "build")
    assert (ran.status, "build: pass (fake)" in ran.out) == (0, True), ran.text
    assert "tier one: /vol/tiers/envs/one" in ran.out
    release.image = next(line.split()[1] for line in ran.out.splitlines() if line.startswith("image im-"))


def test_02_package_leaves_archives_on_the_volume_only(release: Release) -> None:
    ran = release.stage("modal_build.py", "package")
    assert ran.status == 0, ran.text
    assert {PORTABLE, OCI, DOCKER} <= {path.name for path in release.dist.iterdir()}
    assert not list(release.project.release.rglob("*.gz"))


def test_03_container_records_the_release_here_and_says_fake(release: Release) -> None:
    ran = release.stage("modal_build.py", "container")
    assert ran.status == 0, ran.text
    for name in ("portable.json", "container.json"):
        assert (release.project.release / name).read_bytes() == (release.dist / name).read_bytes()
    predicate = release.receipt("container")["predicate"]
    assert predicate["engine"] == "fake"
    assert predicate["details"]["modal"]["image"] == release.image
    assert predicate["tools"]["modal"].startswith("1.6.")


def test_04_every_container_is_a_fresh_one_without_network(release: Release) -> None:
    """The stage's own proof, in its receipt."""
    facts = release.receipt("container")["predicate"]["details"]["modal"]
    assert facts["fresh"] is True
    assert all("unreachable" in said for said in facts["network"].values())
    assert len(facts["network"]) == 2


def test_05_container_check_runs_the_image_from_one_copy_on_local_disk(release: Release) -> None:
    ran = release.plane.run("run", "modal_build.py", "--stage", "container-check", *release.project.words)
    assert ran.status == 0, ran.text
    assert [ran.text.count(f"✓ copy {name}") for name in (OCI, DOCKER)] == [1, 1], "one pass over the far volume"
    outcomes = {c["name"]: c["outcome"] for c in release.receipt("container-check")["predicate"]["checks"]}
    assert outcomes == {"container-archive": "pass", "container-assembly": "pass", "container-exec": "pass", "hello": "pass"}


def test_06_a_stage_without_a_gpu_refuses_the_checks_on_gpus(release: Release) -> None:
    ran = release.stage("modal_qualify.py", "single")
    assert (ran.status, "error[needs.gpu]" in ran.err) == (4, True), ran.text
    assert not list((release.project.release / "receipts").glob("single-*"))


def test_07_nccl8_stops_at_the_first_ubuntu(release: Release) -> None:
    before = release.plane.mark
    ran = release.stage("modal_qualify.py", "nccl8")
    assert (ran.status, "error[needs.gpu]" in ran.err) == (4, True), ran.text
    assert [call["function"] for call in release.plane.events("container", before)] == ["nccl8"]


def test_08_the_second_ubuntu_waits_for_the_first(release: Release) -> None:
    before = release.plane.mark
    ran = release.stage("modal_qualify.py", "nccl8-u24")
    assert (ran.status, "error[stage.first]" in ran.err) == (4, True), ran.text
    assert release.plane.events("container", before) == []


def test_09_receipts_of_the_stand_in_count_for_no_gate(release: Release) -> None:
    """Field reports, H: evidence that says more than was tested. The signatures are good, the engine is not."""
    ran = release.stage("modal_build.py", "qualification")
    assert ran.status == 0, ran.text
    found = json.loads((release.project.release / "qualification.json").read_text())
    assert found["state"] == "candidate"
    assert {gate["state"] for gate in found["gates"]} == {"open"}
    assert ran.out.count("engine fake, wanted local or modal") == 2


def test_10_repack_without_an_image_is_refused_before_anything_starts(release: Release) -> None:
    before = release.plane.mark
    ran = release.stage("modal_repack.py", "repack")
    assert (ran.status, "error[modal.frozen]" in ran.err) == (2, True), ran.text
    assert release.plane.events("container", before) == []


def repack(release: Release) -> Ran:
    return release.stage("modal_repack.py", "repack", "--json", NRL_REPACK_IMAGE_ID=release.image)


def test_11_repack_starts_from_the_frozen_image_and_begins_anew(release: Release) -> None:
    old, before = release.recorded(), release.plane.mark
    checks = release.project.spec.parent / "layers/files/checks.json"
    checks.write_text(json.dumps([*CHECKS, {**CHECKS[0], "name": "again"}]))
    ran = repack(release)
    assert ran.status == 0, ran.text
    assert [e["id"] for e in release.plane.events("image_from_id", before)] == [release.image]
    assert release.plane.events("image", before) == [], "nothing is built on top of it"
    assert json.loads(ran.out)["facts"]["modal"]["frozen"] == release.image, "the container knows it, too"
    assert release.recorded() != old
    assert (release.project.release / "superseded" / old[:12] / "portable.json").is_file()
    assert (release.dist.with_name(f"{release.dist.name}.{old[:12]}") / PORTABLE).is_file()
    statement = release.receipt("repack")
    assert statement["predicate"]["engine"] == "fake"
    assert statement["predicate"]["details"]["from"] == old


def test_12_a_repack_whose_answer_got_lost_can_be_done_again(release: Release) -> None:
    """The volume has the new build, the sender's folder still tells of the old one."""
    fresh = release.recorded()
    (old,) = (p.name for p in (release.project.release / "superseded").iterdir())
    folder = release.project.release
    lost = folder.with_name("lost")
    folder.rename(lost)
    (lost / "superseded" / old).rename(folder)
    (folder / "superseded.json").unlink()
    ran = repack(release)
    assert ran.status == 0, ran.text
    assert release.recorded() == fresh
    assert json.loads((release.dist / "portable.json").read_text())["sha256"] == fresh


def test_13_every_request_of_the_client_was_one_that_the_stand_in_knows(release: Release) -> None:
    assert release.plane.events("unknown") == []
