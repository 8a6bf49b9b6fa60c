"""The oldest and the newest client that pyproject.toml allows, each with its own container runtime."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("modal", reason="needs the extra 'modal'")

from tests.lab.envelopes import statement_of
from tests.lab.modal_plane_client import RunningPlane, bare_python, why_not
from tests.lab.modal_plane_project import Project, make_project

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
]


def with_client(folder: Path, wanted: str) -> Path:
    """An interpreter with that client, which hides the one of the test's own packages."""
    python = bare_python(folder)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check", "--target", site, wanted],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no package index in reach: {done.stderr.strip()[-200:]}")
    return python


@pytest.fixture(params=["modal==1.6.0", "modal>=1.6,<1.7"], ids=["oldest", "newest"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, RunningPlane, Project]]:
    python = with_client(tmp_path / "client", request.param)
    plane = RunningPlane(tmp_path / "plane", python)
    try:
        yield python, plane, make_project(tmp_path / "project", plane)
    finally:
        plane.stop()


def test_stages_run_with_it(client: tuple[Path, RunningPlane, Project]) -> None:
    """Needs of every kind: a volume, no network, a machine that stays, an image keyed by an archive."""
    python, plane, project = client
    version = subprocess.run(
        [python, "-c", "import modal; print(modal.__version__)"], check=True, capture_output=True, text=True
    ).stdout.strip()
    answer = project.spec.with_name("answer.json")
    for name in ("package", "container"):
        ran = plane.run("run", "-q", "-w", str(answer), "modal_build.py", "--stage", name, *project.words, python=str(python))
        assert ran.status == 0, ran.text
        written = json.loads(answer.read_bytes())
        assert (written["stage"], written["outcome"]) == (name, "pass")
    ran = plane.run("run", "-q", "modal_qualify.py", "--stage", "single", *project.words, python=str(python))
    assert (ran.status, "error[needs.gpu]" in ran.err) == (4, True), ran.text
    functions = {f["name"]: f for f in plane.events("function")}
    assert (functions["container"]["nonpreemptible"], functions["container"]["block_network"]) == (True, True)
    assert functions["single"]["gpu"] == "B200"
    (receipt,) = (project.release / "receipts").glob("container-2*")
    assert statement_of(receipt)["predicate"]["tools"]["modal"] == version
