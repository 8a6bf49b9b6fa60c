"""What a build ships beside the tiers: CUDA's tools for the portable archive, licence texts, inventories, the marker."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.model.errors import PolicyError, SpecError
from oci_builder.verify import VerifyOptions, verify_archives

TOOLS = ("bin/nvcc", "bin/ptxas", "bin/cuobjdump", "include/cuda.h")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A base with a toolkit behind links as NVIDIA's image has it, and a staged tier."""
    toolkit = tmp_path / "root/usr/local/cuda-13.0"
    for name in (*TOOLS, "EULA.txt", "doc/manual.pdf"):
        (toolkit / name).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / name).write_text(f"{name}\n")
    (tmp_path / "root/etc/alternatives").mkdir(parents=True)
    (tmp_path / "root/etc/alternatives/cuda").symlink_to("/usr/local/cuda-13.0")
    (tmp_path / "root/usr/local/cuda").symlink_to("/etc/alternatives/cuda")
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier/module.py").write_text("answer = 42\n")
    return tmp_path


def made(place: Path, **more: Any) -> Path:
    spec = {"name": "n", "tag": "t", "base": {"rootfs": "root"}, "prefix": "/opt/rt", "tiers": {"base": {"path": "tier"}}}
    (place / "spec.json").write_text(json.dumps({**spec, **more}))
    build(place / "spec.json", place / "out", BuildOptions(place / "cache", 2))
    return place / "out"


def names(archive: Path) -> set[str]:
    """GNU tar's view."""
    listed = subprocess.run(["tar", "tzf", archive], capture_output=True, text=True, check=True)
    return {line.rstrip("/") for line in listed.stdout.splitlines()}


def test_cudas_tools_go_into_the_portable_archive_only(place: Path) -> None:
    out = made(place, cuda={})
    portable = names(out / "runtime.tar.gz")
    assert {f"opt/rt/cuda/{name}" for name in TOOLS} < portable
    assert "opt/rt/cuda/doc/manual.pdf" not in portable
    with tarfile.open(out / "runtime.docker.tar.gz") as image:
        layers = [m for m in image.getmembers() if m.isfile() and m.size > 1024]
        held = b"".join(image.extractfile(m).read() for m in layers)  # type: ignore[union-attr]
    assert b"opt/rt/envs/base/module.py" in held
    assert b"opt/rt/cuda" not in held


def test_the_record_counts_what_only_the_portable_archive_has(place: Path) -> None:
    out = made(place, cuda={})
    with tarfile.open(out / "runtime.tar.gz") as archive:
        members = archive.getmembers()
    record = json.loads((out / "portable.json").read_text())
    assert record["files"] == sum(m.isfile() or m.islnk() for m in members)
    assert record["entries"] == len({m.name for m in members})


def test_the_portable_archive_lies_in_one_place_where_a_link_of_the_base_leads_the_prefix(place: Path) -> None:
    """ensure_runtime.sh goes down from the top while there is one folder and nothing else."""
    (place / "root/usr/opt").mkdir()
    (place / "root/opt").symlink_to("usr/opt")
    out = made(place, cuda={})
    record = json.loads((out / "portable.json").read_text())
    assert record["prefix"] == "usr/opt/rt"
    above = {"usr", "usr/opt", "usr/opt/rt"}
    assert {name for name in names(out / "runtime.tar.gz") if not name.startswith("usr/opt/rt/")} == above
    assert "usr/opt/rt/cuda/bin/nvcc" in names(out / "runtime.tar.gz")
    assert json.loads((out / "container.json").read_text())["prefix"] == "/opt/rt"


def test_an_image_with_a_toolkit_is_still_ours(place: Path) -> None:
    out = made(place, cuda={})
    report = verify_archives((out / "runtime.oci.tar", out / "runtime.docker.tar.gz"), VerifyOptions(profile="strict"))
    assert report.ok, report.findings


def test_a_base_without_the_tools_is_refused(place: Path) -> None:
    (place / "root/usr/local/cuda-13.0/bin/ptxas").unlink()
    with pytest.raises(SpecError) as caught:
        made(place, cuda={})
    assert (caught.value.code, "bin/ptxas" in caught.value.message) == ("payload.cuda", True)
    assert list((place / "out").iterdir()) == []


def test_a_release_of_staged_trees_carries_its_marker(place: Path) -> None:
    out = made(place, release="v1-r1")
    with tarfile.open(out / "runtime.tar.gz") as archive:
        marker = archive.extractfile("opt/rt/runtime.json")
        assert marker is not None
        assert json.load(marker)["release"] == "v1-r1"
    assert "opt/rt/runtime.json" not in names(made(place) / "runtime.tar.gz")


def test_an_environment_of_uv_brings_inventory_and_licences(place: Path) -> None:
    (place / "base.txt").write_text("")
    portable = names(made(place, tiers={"base": {"requirements": "base.txt"}}, base={"host": True}) / "runtime.tar.gz")
    assert {"opt/rt/inventory-base.json", "opt/rt/licences/index.json", "opt/rt/licences/THIRD-PARTY.md"} < portable


def test_a_cache_that_is_named_relatively_is_as_good(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that prove an environment run in another folder."""
    (place / "base.txt").write_text("")
    spec = {"name": "n", "tag": "t", "base": {"scratch": True}, "prefix": "/opt/rt", "tiers": {"base": {"requirements": "base.txt"}}}
    (place / "spec.json").write_text(json.dumps(spec))
    monkeypatch.chdir(place)
    build(Path("spec.json"), Path("out"), BuildOptions(Path("cache"), 2))
    assert {"opt/rt/python/bin", "opt/rt/envs/base/bin/python"} < names(place / "out/runtime.tar.gz")


def test_an_output_inside_a_tier_is_refused(place: Path) -> None:
    spec = {"name": "n", "tag": "t", "base": {"scratch": True}, "prefix": "/opt/rt", "tiers": {"base": {"path": "tier"}}}
    (place / "spec.json").write_text(json.dumps(spec))
    with pytest.raises(SpecError) as caught:
        build(place / "spec.json", place / "tier/out", BuildOptions(place / "cache", 2))
    assert caught.value.code == "spec.path"
    assert not (place / "tier/out").exists()


@pytest.mark.parametrize("env", ["CUDA_HOME=:/x", "LD_LIBRARY_PATH=/a:", "PATH=/bin::/usr/bin"])
def test_what_verify_would_refuse_is_refused_in_the_spec(place: Path, env: str) -> None:
    """B194."""
    with pytest.raises(SpecError) as caught:
        made(place, env=[env])
    assert (caught.value.code, str(caught.value.fields["where"]).endswith("spec.json: env")) == ("spec.field", True)


def test_too_many_layers_are_refused_before_any_is_made(place: Path) -> None:
    """B029: an image with more layers than overlayfs stacks is built, and cannot start."""
    with pytest.raises(PolicyError) as caught:
        made(place, limits={"layers": 1})
    assert caught.value.code == "limit.layers"
    stored = [p for p in (place / "cache/store").rglob("*") if p.is_file() and p.stat().st_size > 0]
    assert not any(b"module.py" in gunzip(p) for p in stored)


def gunzip(path: Path) -> bytes:
    """A blob's content; nothing of what is no gzip."""
    return subprocess.run(["gzip", "-dcq"], input=path.read_bytes(), capture_output=True).stdout


@pytest.mark.parametrize("base", [{"scratch": True}, {"host": True}])
def test_a_missing_files_folder_is_said_whatever_the_base(place: Path, base: dict[str, bool]) -> None:
    with pytest.raises(SpecError) as caught:
        made(place, base=base, files="absent")
    assert caught.value.code == "spec.path"


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"layer_size": 100}, "limit.layer"), ({"layer_size": 3000}, "limit.layer"), ({"image_size": 3000}, "limit.image")],
)
def test_own_layers_are_bound_by_the_limits_too(place: Path, limits: dict[str, int], code: str) -> None:
    """A layer that every reader of ours would refuse is not made; by its content before, by its tar afterwards."""
    spec = {
        "name": "n", "tag": "t", "base": {"scratch": True}, "prefix": "/opt/rt", "tiers": {"base": {"path": "tier"}},
        "limits": limits,
    }  # fmt: skip
    (place / "spec.json").write_text(json.dumps(spec))
    with pytest.raises(PolicyError) as caught:
        build(place / "spec.json", place / "out", BuildOptions(place / "cache", 2))
    assert caught.value.code == code
    assert list((place / "out").iterdir()) == []
