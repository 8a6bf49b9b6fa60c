"""The assembled runtime: one interpreter for all tiers, shipped when the base has none at its path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import CheckFailed, SpecError
from oci_builder.model.spec import Spec
from oci_builder.payload import runtime as runtime_module
from oci_builder.payload.runtime import Runtime, assemble_runtime
from oci_builder.payload.tiers import realize_tiers
from oci_builder.rootfs.host import python_executable

HOME = Path.home()


def spec_of(tiers: dict[str, Any], **more: Any) -> Spec:
    return Spec.model_validate(
        {"name": "n", "tag": "t", "base": {"host": True}, "prefix": "/opt/x", "tiers": tiers, **more}
    )


def assembled(spec: Spec, place: Path) -> Runtime:
    work = place / "work"
    return assemble_runtime(spec, place, work, realize_tiers(spec, place, work), 2)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "base.txt").write_text("")
    return tmp_path


@pytest.fixture
def other() -> Path:
    """A Python 3.13 or later that is not the one that runs us: its environments can be moved."""
    found = sorted(HOME.glob(".pyenv/versions/3.1[3-9]*/bin/python3"))
    if not found or found[0].resolve() == python_executable():
        pytest.skip("needs a second Python, 3.13 or later")
    return found[0]


def pythons(version: str) -> Path:
    """A Python of this version that is not the one that runs us."""
    found = [Path("/usr/bin/python3")] if version == "distribution" else sorted(
        HOME.glob(f".pyenv/versions/{version}*/bin/python3")
    )  # fmt: skip
    there = next((p for p in found if p.is_file() and p.resolve() != python_executable()), None)
    return there or pytest.skip(f"needs another Python: {version}")


def test_the_host_bases_own_python_is_not_shipped(place: Path) -> None:
    runtime = assembled(spec_of({"base": {"requirements": "base.txt"}}), place)
    assert runtime.trees == {}
    assert os.path.realpath(runtime.tiers["base"] / "bin/python") == str(python_executable())


@pytest.mark.parametrize("version", ["3.13", "3.12", "distribution"])
def test_another_python_is_shipped_and_runs_wherever_the_prefix_is(place: Path, version: str) -> None:
    """Review 16: not off the build machine's own, whichever version it is."""
    python = pythons(version)
    runtime = assembled(spec_of({"base": {"requirements": "base.txt", "python": str(python)}}), place)
    moved = place / "moved"
    (moved / "envs").mkdir(parents=True)
    shutil.copytree(runtime.trees["python"], moved / "python", symlinks=True)
    shutil.copytree(runtime.tiers["base"], moved / "envs/base", symlinks=True)
    assert os.readlink(moved / "envs/base/bin/python").startswith("../../../python/bin/")
    assert "home" not in (moved / "envs/base/pyvenv.cfg").read_text()
    code = "import json, sys, ssl, ctypes; print(json.dumps([sys.prefix, sys.base_prefix]))"
    said = json.loads(subprocess.check_output([moved / "envs/base/bin/python", "-I", "-c", code]))
    assert [os.path.realpath(path) for path in said] == [str(moved / "envs/base"), str(moved / "python")]
    assert not [link for link in moved.rglob("*") if link.is_symlink() and os.readlink(link).startswith("/")], "B141"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_any_user_starts_the_interpreter(place: Path, other: Path) -> None:
    """B139: it was under root's home, which is 0700."""
    runtime = assembled(spec_of({"base": {"requirements": "base.txt", "python": str(other)}}), place)
    whole = runtime.trees["python"].parent
    for above in whole.parents:
        if above != Path("/tmp") and above.is_relative_to("/tmp"):
            above.chmod(0o755)
    for uid in ("1000", "65534"):
        argv = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", whole / "envs/base/bin/python", "-I", "-c"]
        said = subprocess.check_output([*argv, "import ssl, os; print(os.getuid())"], text=True, cwd="/", env={})
        assert said.strip() == uid


def test_an_interpreter_that_stays_behind_is_refused(place: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a moved runtime would do is tried before it is packed."""
    monkeypatch.setattr(runtime_module, "apply_relocation", lambda *_: None)
    monkeypatch.setattr(runtime_module, "audit", lambda root, options: ())
    with pytest.raises(CheckFailed) as caught:
        assembled(spec_of({"base": {"requirements": "base.txt", "python": str(other)}}), place)
    assert caught.value.code == "payload.python"


def test_tiers_of_two_pythons_are_refused(place: Path, other: Path) -> None:
    tiers = {"base": {"requirements": "base.txt"}, "vllm": {"requirements": "base.txt", "python": str(other)}}
    with pytest.raises(SpecError) as caught:
        assembled(spec_of(tiers), place)
    assert caught.value.code == "payload.python"


def test_the_marker_says_whose_prefix_it_is(place: Path) -> None:
    runtime = assembled(spec_of({"base": {"requirements": "base.txt"}}, release="v1-r1"), place)
    assert json.loads(runtime.files["runtime.json"]) == {
        "schema": "oci-builder/runtime/1", "name": "n", "tag": "t", "prefix": "/opt/x", "release": "v1-r1",
        "tiers": ["base"], "source": None,
    }  # fmt: skip


def test_a_staged_tree_stays_as_it_is_and_a_release_of_it_is_marked(place: Path) -> None:
    (place / "tree").mkdir()
    tiers = {"base": {"path": "tree"}}
    assert assembled(spec_of(tiers), place) == Runtime({"base": place / "tree"})
    assert set(assembled(spec_of(tiers, release="r1"), place).files) == {"runtime.json"}


def test_an_assembled_runtime_stands_and_is_not_made_again(place: Path) -> None:
    spec = spec_of({"base": {"requirements": "base.txt"}})
    first = assembled(spec, place).tiers["base"]
    before = first.stat().st_ino
    assert assembled(spec, place).tiers["base"].stat().st_ino == before
