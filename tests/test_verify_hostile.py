"""The hostile catalogue, C2 to C4, C9 and C10, against ``verify``: the stated code, or acceptance."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.model.errors import show
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.verify import VerifyOptions, verify_archives
from tests.hostile import cases_archive, cases_compress, cases_documents
from tests.lab.archives import Lab, entry, tar, write

LABS = [*cases_documents.CASES, *cases_compress.CASES]


def check(path: Path, code: str | None, options: VerifyOptions | None = None) -> None:
    report = verify_archives([path], options)
    found = {finding.code for finding in report.errors}
    if code is None:
        assert report.ok, report.errors
    else:
        assert code in found, (code, report.findings)
        assert report.exit_status in (3, 4)


@pytest.mark.parametrize(("case", "what", "lab", "code"), LABS, ids=[case[0] for case in LABS])
@pytest.mark.parametrize("compress", [False, True], ids=["tar", "tar.gz"])
def test_labs(case: str, what: str, lab: Lab, code: str | None, compress: bool, tmp_path: Path) -> None:
    check(write(tmp_path / "a", lab.oci(), compress=compress), code)


@pytest.mark.parametrize(
    ("case", "what", "build", "code"), cases_archive.CASES, ids=[case[0] for case in cases_archive.CASES]
)
def test_archives(case: str, what: str, build: Callable[[Path], Path], code: str | None, tmp_path: Path) -> None:
    check(build(tmp_path), code)


def test_case_ids_are_unique() -> None:
    ids = [case[0] for case in LABS] + [case[0] for case in cases_archive.CASES]
    assert len(ids) == len(set(ids))


def test_c10_05_extra_members_are_an_error_of_ours_and_a_warning_of_others(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar(*(entry(n, d) for n, d in Lab().docker().items()), entry("extra", b"x")))

    def severities(profile: str) -> set[str]:
        report = verify_archives([path], VerifyOptions(profile))
        return {finding.severity for finding in report.findings if finding.code == "archive.extra"}

    assert severities("foreign") == {"warning"}
    assert severities("strict") == {"error"}


def test_b060_an_orphan_blob_is_reported(tmp_path: Path) -> None:
    members = Lab().oci()
    orphan = Lab(layers=[tar(entry("x", b"orphan"))]).oci()
    path = write(tmp_path / "a.tar", members | {k: v for k, v in orphan.items() if k.startswith("blobs/")})
    report = verify_archives([path])
    assert report.ok and {f.code for f in report.findings} == {"archive.extra"}


@pytest.mark.parametrize("pack", ["gzip", "zstd"])
def test_c9_01_a_bomb_stops_at_the_ratio(pack: str, tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, ratio_floor=8 << 20)
    path = write(tmp_path / "a.tar", Lab(layers=[tar(entry("zeros", bytes(40 << 20)))], pack=pack).oci())
    check(path, "limit.ratio", VerifyOptions(limits=limits))
    check(path, None)


def test_c9_01_an_outer_bomb_stops_too(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, ratio_floor=8 << 20)
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(tar(entry("zeros", bytes(60 << 20))), 9))
    check(path, "limit.ratio", VerifyOptions(limits=limits))


def test_c9_01_the_budget_of_a_layer_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", Lab().oci())
    check(path, "limit.layer", VerifyOptions(limits=replace(DEFAULT_LIMITS, layer_size=2000)))


def test_too_many_members_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar(*(entry(f"m{n}", b"") for n in range(60))))
    check(path, "limit.members", VerifyOptions(limits=replace(DEFAULT_LIMITS, archive_members=50)))


def test_b114_names_that_are_not_utf8_are_shown_reversibly(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", Lab(layers=[tar(entry("caf\udce9", type=b"1", linkname="nowh\udcffere"))]).oci())
    report = verify_archives([path])
    finding = report.errors[0]
    assert show(b"caf\xe9") in finding.message and show(b"nowh\xffere") in finding.message
    json.dumps(report.to_json()).encode("ascii")


@pytest.mark.parametrize("cut", range(0, 8192, 500))
def test_c10_09_truncation_anywhere_is_found(cut: int, tmp_path: Path) -> None:
    whole = write(tmp_path / "a.tar", Lab().oci()).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: min(cut, len(whole) - 1)])
    assert not verify_archives([tmp_path / "cut.tar"]).ok
