"""Packages that are built from source: under which variables, and what the inventory says of them (reviews 6, 22)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.events import silent
from oci_builder.model.spec import LockTier, RequirementsTier
from oci_builder.payload import uv as tools
from oci_builder.payload.environments import realize
from oci_builder.payload.inventory import from_lock
from oci_builder.payload.uv_cache import _wheels
from tests.lab.uv import require_uv, write_sdist
from tests.payload.test_environments import wheel

require_uv()

# The wheel tells what its build saw, and how often it was built.
BACKEND = """
import os, pathlib, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    try: import plain
    except ImportError: pass
    with open(os.environ["HOME"] + "/built", "a") as log: log.write("x")
    seen = {n: os.environ.get(n) for n in ("CFLAGS", "LDFLAGS", "CC", "MAKEFLAGS", "PYTHONHASHSEED", "ARCH")}
    seen.update({n: os.environ[n] for n in ("CUDNN_HOME", "TOP") if n in os.environ})
    files = {"seen.py": f"seen = {seen!r}\\n"}
    files["seen-1.dist-info/METADATA"] = "Metadata-Version: 2.1\\nName: seen\\nVersion: 1\\n"
    files["seen-1.dist-info/WHEEL"] = "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files["seen-1.dist-info/RECORD"] = "".join(f"{path},,\\n" for path in files)
    with zipfile.ZipFile(pathlib.Path(folder, "seen-1-py3-none-any.whl"), "w") as out:
        for path, text in files.items():
            out.writestr(zipfile.ZipInfo(path), text)
    return "seen-1-py3-none-any.whl"
"""
PROJECT = '[project]\nname = "seen"\nversion = "1"\n[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list with one package of sources, whose entry accepts another file too, and one wheel."""
    links, home = tmp_path / "links", tmp_path / "home"
    links.mkdir()
    home.mkdir()
    texts = {
        "backend.py": BACKEND,
        "pyproject.toml": PROJECT,
        "PKG-INFO": "Metadata-Version: 2.1\nName: seen\nVersion: 1\n",
    }
    source = write_sdist(links, "seen-1", texts)
    made = wheel(links, "plain", "2", "x = 1\n")
    (tmp_path / "list.txt").write_text(
        f"seen==1 --hash=sha256:{'0' * 64} --hash=sha256:{source}\nplain==2 --hash=sha256:{made} --hash=sha256:{'f' * 64}\n"
    )
    monkeypatch.setenv("UV_FIND_LINKS", str(links))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(home))
    return tmp_path


def made(place: Path, work: str = "work", **env: str) -> Path:
    return realize("base", RequirementsTier(requirements="list.txt", build_env=env), place, place / work, silent)


def seen(env: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(next(env.glob("lib/python*/site-packages/seen.py")).read_text(), found)
    return dict(found["seen"])


def test_flags_of_the_callers_shell_do_not_reach_a_build(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CFLAGS", "LDFLAGS", "CC", "MAKEFLAGS", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, "1")
    assert seen(made(place, ARCH="100")) == {
        "CFLAGS": None, "LDFLAGS": None, "CC": None, "MAKEFLAGS": None, "PYTHONHASHSEED": None, "ARCH": "100",
    }  # fmt: skip


def test_other_variables_are_another_build_and_equal_ones_the_same(place: Path) -> None:
    """uv's own key for what it built knows the source only."""
    for arch in ("100", "90", "100"):
        assert seen(made(place, ARCH=arch))["ARCH"] == arch
    # The environment of the first stands; the second was built anew.
    assert (place / "home/built").read_text() == "xx"
    assert seen(made(place, "again", ARCH="90"))["ARCH"] == "90"
    assert (place / "home/built").read_text() == "xx"


def test_a_build_can_be_told_where_its_environment_is(place: Path) -> None:
    """Headers that another package of the tier brought: the wheel of cuDNN for Transformer Engine."""
    env = made(place, CUDNN_HOME="{site}/nvidia/cudnn", TOP="{env}")
    seen = next(env.glob("lib/python*/site-packages/seen.py")).read_text()
    site = next(env.glob("lib/python*/site-packages")).relative_to(env)
    assert f"/base/{site}/nvidia/cudnn'" in seen and "/base'}" in seen and "{" not in seen.partition("{")[2]


def test_the_inventory_says_what_builds_were_told(place: Path) -> None:
    """The architectures that kernels are for, as the spec has them."""
    found = [
        json.loads((made(place, **env).parent / "inventory.json").read_bytes()) for env in ({"ARCH": "9.0;10.0"}, {})
    ]
    assert [told.get("build_env") for told in found] == [{"ARCH": "9.0;10.0"}, None]


def test_a_build_without_isolation_leaves_no_bytecode_behind(place: Path) -> None:
    """It imports what the environment has, and bytecode written then tells the folder and the time."""
    (place / "project").mkdir()
    (place / "project/pyproject.toml").write_text(
        '[project]\nname = "whole"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["plain"]\n'
        '[project.optional-dependencies]\nfast = ["seen"]\n[tool.uv]\nno-build-isolation-package = ["seen"]\n'
        '[[tool.uv.dependency-metadata]]\nname = "seen"\nversion = "1"\nrequires-dist = []\n'
    )
    tools.find_uv(place).run("lock", "--quiet", "--project", place / "project", "--python", sys.executable)
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", place / "project", *words], check=True)
    env = realize("base", LockTier(project="project", extras=("fast",)), place, place / "work", silent)
    assert (place / "home/built").read_text() == "x"
    assert list(env.rglob("*.pyc")) == []


def test_what_other_compilers_built_is_built_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(place, ARCH="90")
    monkeypatch.setattr("oci_builder.payload.compilers.FORMAT", "another")
    made(place, "again", ARCH="90")
    assert (place / "home/built").read_text() == "xx"


def test_a_long_name_of_a_wheel_is_read_without_its_length(tmp_path: Path) -> None:
    """MessagePack puts a length of 57 before it, which is the digit 9: nvidia-cublas was 9nvidia_cublas."""
    name = "nvidia_cublas-13.1.0.3-py3-none-manylinux_2_27_x86_64.whl"
    bucket = tmp_path / "wheels-v6/pypi/nvidia-cublas"
    bucket.mkdir(parents=True)
    (bucket / "13.http").write_bytes(b"\xa271\xd9" + bytes([len(name)]) + name.encode() + b"\xa3Sha")
    (bucket / "13").symlink_to("../../../archive-v0/abc")
    assert [origin.file for _, origin in _wheels(tmp_path)] == [name]


def test_a_build_of_somebody_elses_in_the_same_cache_is_not_taken(place: Path) -> None:
    made(place, ARCH="90")
    (place / "cache/oci-builder-built.json").unlink()
    made(place, "again", ARCH="90")
    assert (place / "home/built").read_text() == "xx"


def test_the_inventory_names_the_file_that_was_installed(place: Path) -> None:
    """Of the hashes that the list accepts, one."""
    listed = (place / "list.txt").read_text()
    found = json.loads((made(place).parent / "inventory.json").read_bytes())["packages"]
    plain, built = found
    assert (plain["file"], built["file"], "built" in plain, built["built"]) == (
        "plain-2-py3-none-any.whl", "seen-1-py3-none-any.whl", False, True,
    )  # fmt: skip
    assert (plain["hashes"], built["hashes"]) == (
        [listed.split("sha256:")[3].split()[0]],
        [listed.split("sha256:")[2].split()[0]],
    )


def test_a_lock_names_the_index_without_credentials() -> None:
    package = {"name": "A_b", "version": "1", "source": {"registry": "https://u:p@example.org/simple"}}
    assert from_lock({"package": [package]})["a-b"] == {"hashes": [], "index": "https://***@example.org/simple"}
