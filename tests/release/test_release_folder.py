"""``releases/<release>/``: created once, recomputed from its files."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import CheckFailed, ConflictError, FormatError, OciBuilderError, SpecError, TransportError
from oci_builder.model.gates import parse_gates
from oci_builder.qualification import Rules, check_release, summary, update_release
from oci_builder.release.files import create_exclusively, replace_file
from oci_builder.release.folder import QUALIFICATION, ReleaseFolder
from oci_builder.release.receipts import write_receipt
from tests.release.helpers import DOCKER, NOW, OCI, PORTABLE, SUBJECTS, checks, new_key, policy, receipt, trusted

KEY = new_key()
GATE = {"name": "container-archive", "stage": "container", "checks": ["ok"], "subjects": list(SUBJECTS)}
RULES = Rules(parse_gates([GATE]), policy(trusted(KEY)))


@pytest.fixture
def folder(tmp_path: Path) -> ReleaseFolder:
    made = ReleaseFolder(tmp_path / "v1-r1").create()
    made.add("portable.json", json.dumps({"sha256": SUBJECTS[PORTABLE]}).encode())
    archives = {OCI: {"sha256": SUBJECTS[OCI]}, DOCKER: {"sha256": SUBJECTS[DOCKER]}}
    made.add("container.json", json.dumps({"archives": archives}).encode())
    return made


def test_recorded_and_recomputed_agree(folder: ReleaseFolder) -> None:
    write_receipt(folder.receipts, receipt(), SUBJECTS, KEY)
    assert update_release(folder.root, RULES, NOW)["state"] == "pass"
    assert check_release(folder.root, RULES)["state"] == "pass"


def test_a_pass_written_by_hand_is_found_out(folder: ReleaseFolder) -> None:
    value = update_release(folder.root, RULES, NOW)
    (folder.root / QUALIFICATION).write_text(json.dumps({**value, "state": "pass"}))
    with pytest.raises(CheckFailed) as caught:
        check_release(folder.root, RULES)
    assert (caught.value.code, caught.value.fields["expected"]) == ("qualification.differs", "candidate")


def test_a_receipt_that_is_taken_away_is_found_out(folder: ReleaseFolder) -> None:
    path = write_receipt(folder.receipts, receipt(), SUBJECTS, KEY)
    update_release(folder.root, RULES, NOW)
    path.unlink()
    with pytest.raises(CheckFailed):
        check_release(folder.root, RULES)


def test_no_qualification_is_a_no(folder: ReleaseFolder) -> None:
    with pytest.raises(CheckFailed) as caught:
        check_release(folder.root, RULES)
    assert caught.value.code == "qualification.missing"


def test_an_update_keeps_the_qualification_before_it(folder: ReleaseFolder) -> None:
    update_release(folder.root, RULES, NOW)
    first = (folder.root / QUALIFICATION).read_bytes()
    write_receipt(folder.receipts, receipt(checks=checks(ok="fail")), SUBJECTS, KEY)
    assert update_release(folder.root, RULES, NOW)["state"] == "failed"
    assert (folder.root / "qualification.1.json").read_bytes() == first


def test_an_update_that_changes_nothing_writes_nothing(folder: ReleaseFolder) -> None:
    update_release(folder.root, RULES, NOW)
    before = {p.name: p.stat().st_mtime_ns for p in folder.root.iterdir()}
    update_release(folder.root, RULES, NOW + timedelta(days=3))
    assert {p.name: p.stat().st_mtime_ns for p in folder.root.iterdir()} == before


def test_the_folder_name_is_the_release(folder: ReleaseFolder, tmp_path: Path) -> None:
    """Copying a release's folder under another name does not qualify that name."""
    write_receipt(folder.receipts, receipt(), SUBJECTS, KEY)
    copy = folder.root.rename(tmp_path / "v1-r2")
    found = update_release(copy, RULES, NOW)
    assert (found["state"], "belongs to release v1-r1" in found["refused"][0]["reasons"][0]) == ("candidate", True)


def test_superseded(folder: ReleaseFolder) -> None:
    folder.add("superseded.json", json.dumps({"by": "9" * 64}).encode())
    assert update_release(folder.root, RULES, NOW)["state"] == "superseded"


def test_junk_among_the_receipts_is_refused_and_named(folder: ReleaseFolder) -> None:
    (folder.receipts / "junk.json").write_bytes(b"{")
    found = update_release(folder.root, RULES, NOW)
    assert found["refused"][0]["receipt"] == "junk.json"
    assert any("junk.json" in line for line in summary(found))


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "a\n"])
def test_only_plain_names_are_added(folder: ReleaseFolder, name: str) -> None:
    with pytest.raises(SpecError) as caught:
        folder.add(name, b"")
    assert caught.value.code == "release.name"


@pytest.mark.parametrize("text", ["{", '{"sha256": "xyz"}', "[]", "{}"])
def test_a_broken_portable_json_is_an_error_of_ours(tmp_path: Path, text: str) -> None:
    made = ReleaseFolder(tmp_path / "v1-r1").create()
    made.add("portable.json", text.encode())
    with pytest.raises(OciBuilderError) as caught:
        update_release(made.root, RULES, NOW)
    assert isinstance(caught.value, FormatError)


def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    def attempt(number: int) -> int | None:
        try:
            create_exclusively(tmp_path / "x", b"%d" % number)
        except ConflictError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        winners = [n for n in pool.map(attempt, range(40)) if n is not None]
    assert [str(n).encode() for n in winners] == [(tmp_path / "x").read_bytes()]
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
@pytest.mark.parametrize("write", [create_exclusively, replace_file])
def test_a_read_only_disk_is_told_as_one_and_by_the_file_s_name(tmp_path: Path, write: Any) -> None:
    """B139's kind: the temporary file that could not be made must not be what the message is about."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=16k", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("no mounts here")
    try:
        with pytest.raises(TransportError) as caught:
            write(place / "page.html", b"x")
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert (caught.value.code, ".tmp" in caught.value.message) == ("io.readonly", False)


def test_no_folder_is_an_io_error(tmp_path: Path) -> None:
    with pytest.raises(TransportError) as caught:
        create_exclusively(tmp_path / "none" / "x", b"")
    assert caught.value.code == "io.error"
    with pytest.raises(SpecError):
        check_release(tmp_path / "none", RULES)


def test_a_candidate_without_gates_is_told_why_it_stays_one() -> None:
    nothing = {"release": "r1", "state": "candidate", "gates": [], "refused": [], "not_tested": []}
    assert any("no gates" in line for line in summary(nothing))
    gate = {"name": "g", "state": "open", "required": True, "reasons": []}
    assert not any("no gates" in line for line in summary({**nothing, "gates": [gate]}))
