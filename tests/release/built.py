"""A small release that was really built and recorded: what is published, attached and judged in the tests."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

from oci_builder.build import BuildOptions, build
from oci_builder.record import RecordRequest, record
from oci_builder.release.delivery import Publication
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.signing import SigningKey, new_key

KEY = new_key()
GATES = [{"name": "delivered", "stage": "publish", "checks": ["secrets"], "required": False, "not_tested": ["8B runs"]}]


def package(tier: Path, name: str, version: str, licence: str = "MIT") -> Path:
    """One installed distribution."""
    info = tier / f"lib/python3.13/site-packages/{name}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: {licence}\n"
    (info / "METADATA").write_text(text)
    (info / "RECORD").write_text(f"{name}.py,,\n")
    return info


def make_spec(place: Path, **changes: object) -> Path:
    """Two tiers that share a package, and a spec for them."""
    for name, version in (("a", "1.0"), ("b", "2.0")):
        tier = place / "envs" / name
        package(tier, "own", version)
        package(tier, "common", "3.1", "Apache-2.0")
        (tier / "data.bin").write_bytes(os.urandom(6000))
    tiers = {name: {"path": f"envs/{name}"} for name in ("a", "b")}
    spec = {
        "name": "x", "tag": "t", "release": "v1-r1", "epoch": 86400, "base": {"scratch": True}, "prefix": "/opt/rt",
        "tiers": tiers, "gates": GATES, **changes,
    }  # fmt: skip
    (place / "spec.json").write_text(json.dumps(spec))
    trust = {"name": "t", "public": base64.b64encode(KEY.public).decode(), "not_before": "2020-01-01T00:00:00Z"}
    (place / "trust.json").write_text(json.dumps({"keys": [{**trust, "not_after": "2099-01-01T00:00:00Z"}]}))
    (place / "ensure_runtime.sh").write_text("#!/bin/bash\n")
    return place / "spec.json"


def make_build(place: Path, **changes: object) -> Path:
    """The build of that spec; the folder of the archives."""
    build(make_spec(place, **changes), place / "dist", BuildOptions(place / "cache"))
    return place / "dist"


def request(place: Path, key: SigningKey = KEY) -> RecordRequest:
    """How it is recorded."""
    return RecordRequest(place / "dist", ReleaseFolder(place / "releases/v1-r1"), place / "spec.json", key)


def publication(place: Path) -> Publication:
    """What is published of it, in parts."""
    folder = ReleaseFolder(place / "releases/v1-r1")
    return Publication(folder, place / "dist", place / "ensure_runtime.sh", KEY, max_file=9000, part_size=3000)


def make_release(place: Path, **changes: object) -> Publication:
    """The build, recorded."""
    make_build(place, **changes)
    record(request(place))
    return publication(place)


def recorded_by_hand(place: Path) -> Publication:
    """A folder with the records alone, as somebody makes it who wants to leave a check out."""
    folder = ReleaseFolder(place / "releases/v1-r1").create()
    for name in ("portable.json", "container.json"):
        folder.add(name, (place / "dist" / name).read_bytes())
    return publication(place)
