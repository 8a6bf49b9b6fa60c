"""The controls that need torch, in Debian 13 with its CPU build, each file by pytest in the project's own sandbox."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from tests.lab.debian_roots import lab_folder, made

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# File -> how many tests it has at least: none may be lost on the way.
FILES = {"test_controls.py": 15, "test_exchange.py": 80, "test_kernels.py": 8, "test_real_ray.py": 2}
# Seconds; for what hangs, not for what is slow.
LIMIT = 2400


@pytest.fixture(scope="module")
def debian() -> Path:
    """The root file system: about 1 GB, made in one to three minutes and kept."""
    if os.geteuid() or not shutil.which("mmdebstrap"):
        pytest.skip("needs root and mmdebstrap to make a Debian with torch")
    root = lab_folder() / "torch"
    made([HERE / "torch_root.sh", root, sys.executable], "Debian with torch")
    return root


def outcomes(report: Path) -> dict[str, str]:
    """Test -> passed, or what became of it; of a JUnit report."""
    cases = xml.parse(report).getroot().iter("testcase")
    return {f"{c.get('classname')}::{c.get('name')}": next((child.tag for child in c), "passed") for c in cases}


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.network
@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=pytest.mark.soak if "ray" in file else ()) for file in FILES]
)
def test_the_controls_pass_with_a_real_torch(debian: Path, tmp_path: Path, file: str) -> None:
    """None is skipped there: a control that did not run has shown nothing."""
    argv = ["python3", "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", "/lab", "-p", "no:cacheprovider",
            "-o", "tmp_path_retention_policy=none", "--junitxml", "/out/report.xml", f"/lab/tests/checks/{file}"]  # fmt: skip
    # One thread: several that spin for each other on a busy machine take ten times as long.
    env = {"PYTHONPATH": "/opt/site", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HOME": "/tmp"}
    binds = [{"source": f"{ROOT}/{place}", "target": f"/lab/{place}"} for place in ("tests/checks", "layers/files")]
    request = {
        "schema": "chroot-exec/1", "root": str(debian), "env": env, "isolation": "root",
        "binds": [*binds, {"source": str(tmp_path), "target": "/out", "read_only": False}],
        "checks": [{"name": file, "argv": argv, "timeout": LIMIT}],
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "chroot_exec", "-"], input=json.dumps(request), cwd=ROOT, text=True, capture_output=True)  # fmt: skip
    if done.returncode == 125:
        pytest.skip(f"no sandbox here: {done.stderr[-300:]}{done.stdout[-300:]}")
    said = json.loads(done.stdout)["checks"][0]
    assert (tmp_path / "report.xml").exists(), said
    found = outcomes(tmp_path / "report.xml")
    assert {name: outcome for name, outcome in found.items() if outcome != "passed"} == {}, said["stdout"]["text"]
    assert len(found) >= FILES[file]
