"""The releases in this repository: what they say follows from what they hold."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from oci_builder.model.receipts import parse_time
from oci_builder.qualification import Rules, check_release
from oci_builder.receipt import verify_receipt
from oci_builder.release.folder import ReleaseFolder
from oci_builder.report import report_data

RELEASES = Path(__file__).resolve().parents[2] / "releases"
TRUST = RELEASES / "trust.json"
KEPT = sorted(path.parent for path in RELEASES.glob("*/portable.json"))


def rules(folder: Path) -> Rules:
    return Rules.load(folder / "spec.json", TRUST)


def judged_at(folder: Path) -> datetime:
    """This machine's clock decides nothing."""
    return parse_time(json.loads((folder / "qualification.json").read_text())["evaluated_at"])


@pytest.mark.parametrize("folder", KEPT, ids=lambda p: p.name)
def test_a_verdict_follows_from_its_files(folder: Path) -> None:
    assert check_release(folder, rules(folder))["refused"] == []


@pytest.mark.parametrize("folder", KEPT, ids=lambda p: p.name)
def test_every_signature_holds(folder: Path) -> None:
    subjects, now = ReleaseFolder(folder).subjects(), judged_at(folder)
    for path in [*folder.glob("receipts/*.json"), folder / "provenance.json"]:
        assert verify_receipt(path, TRUST, now, subjects).answer.value == "verified"


@pytest.mark.parametrize("folder", KEPT, ids=lambda p: p.name)
def test_it_tells_nothing_about_the_machine_s_folders(folder: Path) -> None:
    page = report_data(folder, rules(folder).gates, rules(folder).policy, judged_at(folder))
    assert not any(word in json.dumps(page) for word in ("/tmp/", "/root/", "/home/"))


def test_no_key_of_the_repository_may_sign_for_a_gpu() -> None:
    """Until somebody who has the hardware adds a key of his own."""
    for key in json.loads(TRUST.read_text())["keys"]:
        assert key["stages"] and not {"single", "nccl8", "nccl8-u24"} & set(key["stages"])
