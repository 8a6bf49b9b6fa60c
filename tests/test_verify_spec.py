"""``verify --spec``: what we build is the spec's image, and every field that differs is said, with exit status 1."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.model.report import Report
from oci_builder.model.spec import parse_spec
from oci_builder.verify import VerifyOptions, verify_archives
from tests.lab.archives import Lab, write

EPOCH = 1_700_000_000
SPEC: dict[str, Any] = {
    "name": "lab/held", "tag": "t1", "release": "r1", "epoch": EPOCH, "prefix": "/opt/rt",
    "tiers": {"one": {"path": "one"}}, "env": ["RT=/opt/rt", "A=b"], "user": "1000:1000", "workdir": "/opt/rt",
    "entrypoint": ["/bin/run"], "cmd": ["x"], "labels": {"team": "lab"},
}  # fmt: skip


class Made:
    """Both archives, and a way to hold them to another spec."""

    def __init__(self, folder: Path) -> None:
        write(folder / "base.tar", Lab(name="lab/base:1").oci())
        (folder / "one/bin").mkdir(parents=True)
        (folder / "one/bin/tool").write_text("x")
        os.utime(folder / "one/bin/tool", (EPOCH + 999, EPOCH + 999))
        self.spec = {**SPEC, "base": {"oci": "base.tar"}}
        (folder / "spec.json").write_text(json.dumps(self.spec))
        build(folder / "spec.json", folder / "out", BuildOptions(folder / "cache", 1))
        self.oci, self.docker = folder / "out/runtime.oci.tar", folder / "out/runtime.docker.tar.gz"

    def held_to(self, **changes: Any) -> Report:
        spec = parse_spec(json.dumps({**self.spec, **changes}).encode())
        return verify_archives([self.oci, self.docker], VerifyOptions(profile="strict", threads=1), spec)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("held"))


def test_what_we_build_is_the_specs_image(made: Made) -> None:
    assert made.held_to().findings == ()


@pytest.mark.parametrize(("changes", "code"), [
    ({"tag": "t2"}, "check.name"), ({"name": "lab/other"}, "check.name"), ({"release": "r2"}, "check.labels"),
    ({"labels": {"team": "other"}}, "check.labels"), ({"base": {"oci": "other.tar"}}, "check.base"),
    ({"base": {"registry": "r.example/b:1", "digest": "sha256:" + "0" * 64}}, "check.base"),
    ({"env": ["RT=/opt/other"]}, "check.env"), ({"env": ["NEW=1"]}, "check.env"), ({"user": "0"}, "check.config"),
    ({"workdir": "/"}, "check.config"), ({"entrypoint": ["/bin/sh"]}, "check.config"), ({"cmd": []}, "check.config"),
    ({"prefix": "/opt/other"}, "check.prefix"), ({"tiers": {"two": {"path": "x"}}}, "check.prefix"),
    ({"epoch": EPOCH - 1}, "check.epoch"), ({"epoch": EPOCH + 1}, "check.config"),
    ({"compression": {"codec": "zstd"}}, "check.compression"),
])  # fmt: skip
def test_each_difference_is_named(made: Made, changes: dict[str, Any], code: str) -> None:
    report = made.held_to(**changes)
    assert (report.ok, report.exit_status) == (False, 1)
    assert code in {finding.code for finding in report.errors}
    assert all(finding.expected or finding.actual for finding in report.errors)


def test_another_platform(made: Made, tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", Lab(platform=("linux", "arm64")).oci())
    report = verify_archives(
        [archive], VerifyOptions(platform="linux/arm64"), parse_spec(json.dumps(made.spec).encode())
    )
    assert "check.platform" in {finding.code for finding in report.errors}


def test_what_is_broken_is_not_compared(made: Made, tmp_path: Path) -> None:
    """Bytes that lie come first: exit status 3."""
    (tmp_path / "cut.tar").write_bytes(made.oci.read_bytes()[:4000])
    spec = parse_spec(json.dumps(made.spec).encode())
    assert verify_archives([tmp_path / "cut.tar"], None, spec).exit_status == 3


def test_two_broken_archives_are_both_named(made: Made, tmp_path: Path) -> None:
    for name in ("one.tar", "two.tar"):
        (tmp_path / name).write_bytes(b"hello world" * 100)
    whole = made.docker.read_bytes()
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    for pair in (("one.tar", "two.tar"), ("one.tar", "cut.gz"), ("absent", "cut.gz"), ("cut.gz", "absent")):
        report = verify_archives([tmp_path / name for name in pair])
        for name in pair:
            assert any(name in finding.where for finding in report.errors), (pair, report.errors)
