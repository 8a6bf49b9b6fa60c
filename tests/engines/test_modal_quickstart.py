"""examples/quickstart on the stand-in: uv makes three environments on the volume, as on Modal."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("modal", reason="needs the extra 'modal'")

from oci_builder.model.receipts import PORTABLE
from tests.lab.modal_plane_client import ROOT, RunningPlane, bare_python, why_not
from tests.lab.modal_plane_project import VOLUME

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
]
SPEC = ["--spec", "examples/quickstart/spec.json"]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_python(tmp_path_factory.mktemp("python") / "venv")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, python: Path) -> Iterator[RunningPlane]:
    plane = RunningPlane(tmp_path_factory.mktemp("plane"), python)
    plane.secrets = {"oci-builder-key": {}}
    plane.faults()
    try:
        yield plane
    finally:
        plane.stop()


@pytest.mark.parametrize("stage", ["build", "package", "container", "container-check"])
def test_the_stages_in_turn(stage: str, plane: RunningPlane) -> None:
    ran = plane.run("run", "-q", "modal_build.py", "--stage", stage, *SPEC, "--yes", timeout=600)
    assert ran.status == 0, ran.text
    assert f"{stage}: pass (fake)" in ran.out


def test_tiers_share_files_by_hard_links_on_the_volume(plane: RunningPlane) -> None:
    tiers = plane.volume(VOLUME) / "cache/tiers"
    linked = [p for p in tiers.rglob("*.py") if p.is_file() and p.stat().st_nlink > 1]
    assert len(linked) > 100


def test_the_same_stage_here_makes_the_same_portable_archive(plane: RunningPlane, python: Path, tmp_path: Path) -> None:
    """The same code on both engines: other paths, another process, the same bytes."""
    code = "from oci_builder.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    command = [python, "-c", code, "stage", "package", *SPEC, "--out", tmp_path / "dist", "--cache", tmp_path / "cache"]
    done = subprocess.run([str(w) for w in command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    far = json.loads((plane.volume(VOLUME) / "dist/quickstart-r1/portable.json").read_text())
    near = json.loads((tmp_path / "dist/portable.json").read_text())
    assert near["sha256"] == far["sha256"]
    assert (tmp_path / "dist" / PORTABLE).stat().st_size == near["size"]
