"""Evidence around real builds: the records that a build writes, a repack that rebuilds, the page, the scan."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.engines.repacking import _place_in_archive
from oci_builder.model.errors import OciBuilderError
from oci_builder.model.gates import parse_gates
from oci_builder.model.receipts import DOCKER, OCI, PORTABLE
from oci_builder.model.spec import load_spec
from oci_builder.qualification import spec_sha256
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.host import utc_now
from oci_builder.repack import RepackRequest, repack
from oci_builder.report import report_data
from tests.release.helpers import checks, new_key, policy, trusted

KEY = new_key()
POLICY = policy(trusted(KEY, not_before="2020-01-01T00:00:00Z", not_after="2099-01-01T00:00:00Z"))
GATES = parse_gates([{"name": "g", "stage": "container", "checks": ["ok"]}])
LAYER = """name = "runtime"
[[file]]
from = "files/activate.sh"
to = "activate.sh"
[[file]]
from = "files/m.json"
to = "runtime.json"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A spec with two tiers that share a library, shipped files with a marker, and its release folder."""
    for tier in ("a", "b"):
        (tmp_path / "envs" / tier / "lib").mkdir(parents=True)
        (tmp_path / "envs" / tier / "own.py").write_text(f"print({tier!r})\n")
    (tmp_path / "envs/a/lib/big.so").write_bytes(os.urandom(3 << 20))
    os.link(tmp_path / "envs/a/lib/big.so", tmp_path / "envs/b/lib/big.so")
    (tmp_path / "layers/files").mkdir(parents=True)
    (tmp_path / "layers/runtime.toml").write_text(LAYER)
    (tmp_path / "layers/files/activate.sh").write_text("echo 1\n")
    (tmp_path / "layers/files/m.json").write_text('{"name": "x", "prefix": "/opt/rt"}')
    spec = {
        "name": "x", "tag": "t", "release": "v1-r1", "base": {"scratch": True}, "prefix": "/opt/rt", "files": "layers",
        "tiers": {t: {"path": str(tmp_path / "envs" / t)} for t in ("a", "b")},
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    rebuild(tmp_path, tmp_path / "dist")
    folder = ReleaseFolder(tmp_path / "releases/v1-r1").create()
    for name in ("portable.json", "container.json"):
        folder.add(name, (tmp_path / "dist" / name).read_bytes())
    return tmp_path


def rebuild(place: Path, out: Path) -> None:
    build(place / "spec.json", out, BuildOptions(place / "cache"))


def request(place: Path) -> RepackRequest:
    folder = ReleaseFolder(place / "releases/v1-r1")
    packaging = frozenset({b"opt/rt/activate.sh"})
    layers = frozenset({"runtime"})
    return RepackRequest(place / "dist", folder, GATES, POLICY, b"opt/rt/runtime.json", packaging, layers, KEY)


def test_a_build_s_records_name_its_archives(place: Path) -> None:
    found = ReleaseFolder(place / "releases/v1-r1").subjects()
    assert found == {n: hashlib.sha256((place / "dist" / n).read_bytes()).hexdigest() for n in (PORTABLE, OCI, DOCKER)}


def test_a_real_repack_changes_one_layer_and_all_three_archives(place: Path) -> None:
    before = json.loads((place / "dist/container.json").read_text())
    old = request(place).folder.subjects()
    (place / "layers/files/activate.sh").write_text("echo 2\n")
    done = repack(request(place), lambda out: rebuild(place, out), lambda _: checks(imports="pass"), utc_now())
    after = json.loads((place / "dist/container.json").read_text())
    differing = [a["name"] for a, b in zip(before["layers"], after["layers"], strict=True) if a != b]
    assert (differing, done.changes.paths) == (["runtime"], (b"opt/rt/activate.sh",))
    new = request(place).folder.subjects()
    assert all(new[name] != old[name] for name in old)


def test_a_repack_follows_a_prefix_that_links_of_the_base_led_elsewhere(place: Path) -> None:
    (place / "root/usr/opt").mkdir(parents=True)
    (place / "root/opt").symlink_to("usr/opt")
    spec = json.loads((place / "spec.json").read_text())
    (place / "spec.json").write_text(json.dumps({**spec, "base": {"rootfs": "root"}}))
    rebuild(place, place / "dist")
    for name in ("portable.json", "container.json"):
        (place / "releases/v1-r1" / name).write_bytes((place / "dist" / name).read_bytes())
    (place / "layers/files/activate.sh").write_text("echo 2\n")
    where = _place_in_archive(place / "dist", "/opt/rt")
    asked = replace(request(place), marker=where + b"/runtime.json", packaging=frozenset({where + b"/activate.sh"}))
    done = repack(asked, lambda out: rebuild(place, out), lambda _: checks(imports="pass"), utc_now())
    assert done.changes.paths == (b"usr/opt/rt/activate.sh",)


@pytest.mark.parametrize("path", ["envs/a/own.py", "layers/files/m.json"])
def test_a_real_change_elsewhere_stops_a_repack(place: Path, path: str) -> None:
    (place / "layers/files/activate.sh").write_text("echo 2\n")
    (place / path).write_text('{"name": "other"}')
    with pytest.raises(OciBuilderError) as caught:
        repack(request(place), lambda out: rebuild(place, out), lambda _: checks(imports="pass"), utc_now())
    assert caught.value.code in ("repack.scope", "repack.marker")


def test_the_page_of_a_real_build(place: Path) -> None:
    data = report_data(place / "releases/v1-r1", GATES, POLICY, utc_now())
    assert {v["name"]: v["kind"] for v in data["layers"]} == {
        "a+b": "shared", "a": "own", "b": "own", "runtime": "runtime",
    }  # fmt: skip
    assert [t["shared"] > 3 << 20 for t in data["tiers"]] == [True, True]


def test_the_spec_digest_does_not_depend_on_the_gates(place: Path) -> None:
    first = spec_sha256(load_spec(place / "spec.json"))
    value = json.loads((place / "spec.json").read_text())
    (place / "spec.json").write_text(json.dumps({**value, "gates": [{"name": "g", "stage": "s", "checks": ["c"]}]}))
    assert spec_sha256(load_spec(place / "spec.json")) == first
    (place / "spec.json").write_text(json.dumps({**value, "epoch": 5}))
    assert spec_sha256(load_spec(place / "spec.json")) != first
