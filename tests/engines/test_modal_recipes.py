"""The image recipes, as they reach the control plane, run for real on Debian: a package that is not there, a version
that no index has or a word that the shell reads otherwise is found here and not by Modal's builder.

What stands for what is said in ``tests/lab/recipes.py``; Ubuntu's own archive is not asked.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("modal", reason="needs the extra 'modal'")

from oci_builder.engines.modal_app import BUILD_PACKAGES, PACKAGES, RUNTIME
from oci_builder.model.receipts import PORTABLE
from tests.chroot.distribution import debian
from tests.engines.stages_lab import make_lab
from tests.engines.test_modal_bindings import Seen, drive
from tests.lab.modal_plane_client import ROOT, RunningPlane, why_not
from tests.lab.recipes import Root

pytestmark = [
    pytest.mark.root,
    pytest.mark.soak,  # a compiler and its like, twice, from an archive
    pytest.mark.network,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
]
PROGRAMS = ("cc --version", "c++ --version", "cmake --version", "ninja --version", "git --version", "git lfs version",
            "uv --version", "patchelf --version")  # fmt: skip
MODULES = ("click", "cryptography", "deflate", "isal", "oras", "pydantic", "elftools", "requests", "rich", "urllib3",
           "zstandard")  # fmt: skip


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlane]:
    plane = RunningPlane(tmp_path_factory.mktemp("plane"), Path(sys.executable))
    try:
        yield plane
    finally:
        plane.stop()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    try:
        made = Root(debian(), tmp_path / "root")
    except unittest.SkipTest as why:
        pytest.skip(str(why))
    try:
        yield made
    finally:
        shutil.rmtree(made.path)  # a gigabyte


def recipe(plane: RunningPlane, folder: Path, stage: str, sha: str = "") -> list[str]:
    folder.mkdir()
    drive(plane, folder, sha, stage, base={"scratch": True})
    return Seen(plane).recipe(stage).splitlines()


def installed(root: Root, wanted: dict[str, str]) -> None:
    done = root.shell("python -m pip list --format freeze")
    found = {line.partition("==")[0].lower().replace("_", "-") for line in done.stdout.splitlines()}
    assert {name.lower().replace("_", "-") for name in wanted} <= found, done.stdout + done.stderr


def imports(root: Root, code: str) -> subprocess.CompletedProcess[str]:
    for package in ("oci_builder", "chroot_exec"):
        shutil.copytree(ROOT / package, root.path / "root" / package, ignore=shutil.ignore_patterns("__pycache__"))
    return root.shell(f"python -c '{code}'", PYTHONPATH="/root")


def test_the_build_family_has_what_stages_call_and_import(plane: RunningPlane, root: Root, tmp_path: Path) -> None:
    """Every stage's code is imported there by the image's Python, with the versions that the sender has."""
    lines = recipe(plane, tmp_path / "sender", "build")
    assert lines[0] == "FROM ubuntu:22.04"
    root.follow(lines, {})
    installed(root, {**PACKAGES, **BUILD_PACKAGES})
    for program in PROGRAMS:
        done = root.shell(program)
        assert done.returncode == 0, f"{program}: {done.stderr}"
    done = imports(root, f"import {', '.join(MODULES)}, oci_builder.engines.modal_container")
    assert done.returncode == 0, done.stderr


def test_the_host_family_installs_the_archive_as_users_do(plane: RunningPlane, root: Root, tmp_path: Path) -> None:
    """The last step, with a real portable archive on what stands for the volume."""
    (tmp_path / "lab").mkdir()
    lab = make_lab(tmp_path / "lab", base={"scratch": True})
    assert lab.result("package")["outcome"] == "pass"
    there = root.path / "vol/dist/r1"
    there.mkdir(parents=True)
    shutil.copy(lab.out / PORTABLE, there)
    sha = hashlib.sha256((there / PORTABLE).read_bytes()).hexdigest()
    lines = recipe(plane, tmp_path / "sender", "single", sha)
    assert sha in lines[-1]
    root.follow(lines, {"/oci-builder/ensure_runtime.sh": ROOT / "layers/files/ensure_runtime.sh"})
    installed(root, PACKAGES)
    assert "'one'" in root.shell(f"{RUNTIME}/envs/one/bin/hello").stdout
    done = imports(root, f"import {', '.join(MODULES)}, oci_builder.engines.modal_container")
    assert done.returncode == 0, done.stderr


def test_a_wrong_recipe_is_found(root: Root) -> None:
    for step in ("RUN apt-get install -y no-such-package-at-all", "RUN exit 3", "WORKDIR /x"):
        with pytest.raises(AssertionError):
            root.follow([step], {})
