"""A release folder that somebody else writes to as well: files that were added, verdicts recorded at once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.model.errors import CheckFailed
from oci_builder.publish import publish
from oci_builder.qualification import Rules, check_release, update_release
from oci_builder.release.delivery import Judge, Publication, keep
from oci_builder.release.host import utc_now
from oci_builder.release.publish import HubTarget
from tests.lab.hub import TOKEN, FakeHub
from tests.release.built import KEY, make_release, publication
from tests.release.helpers import receipt, signed

pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")


@pytest.fixture
def release(made: Path, tmp_path: Path) -> Iterator[Publication]:
    """A copy of it, judged."""
    place = tmp_path / "copy"
    shutil.copytree(made, place)
    what = publication(place)
    update_release(what.folder.root, rules(what), utc_now())
    yield replace(what, judge=Judge(rules(what).gates, rules(what).policy, rules(what).spec))


def rules(what: Publication) -> Rules:
    place = what.folder.root.parent.parent
    return Rules.load(place / "spec.json", place / "trust.json")


@pytest.mark.parametrize("name", ["c.cdx.json", "inventory-c.json", "provenance-2.json"])
def test_a_file_that_was_added_is_found_out_and_not_sent(release: Publication, name: str) -> None:
    """What has such a name would be published, and attached to the image, as if it had been recorded."""
    (release.folder.root / name).write_text("{}")
    for run in (
        lambda: check_release(release.folder.root, rules(release)),
        lambda: publish(release, HubTarget("o/r", endpoint="http://127.0.0.1:1")),
    ):
        with pytest.raises(CheckFailed) as caught:
            run()
        assert caught.value.code == "release.rewritten" and name in caught.value.message


def test_a_spec_that_was_not_kept_does_not_judge_later(tmp_path: Path) -> None:
    """``record`` leaves out a spec that may hold a credential; whoever adds one adds gates."""
    gates = [{"name": "g", "stage": "publish", "checks": ["secrets"], "title": "password=correct-horse"}]
    what = make_release(tmp_path, gates=gates)
    kept = what.folder.root / "spec.json"
    assert not kept.exists()
    update_release(what.folder.root, rules(what), utc_now())
    kept.write_text((tmp_path / "spec.json").read_text())
    with pytest.raises(CheckFailed) as caught:
        check_release(what.folder.root, rules(what))
    assert caught.value.code == "release.rewritten" and "spec.json" in caught.value.message


def test_verdicts_of_many_at_once_agree_with_the_files(release: Publication) -> None:
    """Each receipt that comes in is judged together with those before it."""
    (release.folder.root / "qualification.json").unlink()
    envelopes = [signed(KEY, receipt(attempt=f"a{i}"), release.folder.subjects()) for i in range(6)]

    def one(number: int) -> None:
        keep(release, f"container-{number}.json", envelopes[number], utc_now())

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(6)))
    check_release(release.folder.root, rules(release))
    assert not list(release.folder.root.glob(".*.tmp"))


def test_a_verdict_that_is_replaced_while_it_is_sent_is_sent_as_it_was(
    release: Publication, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    path = release.folder.root / "qualification.json"
    with FakeHub() as hub:

        def another(_request: object) -> None:
            path.write_bytes(path.read_bytes() + b"\n")

        hub.faults.append(another)
        publish(release, HubTarget("o/r", endpoint=hub.url))
        assert hub.files["README.md"] and hub.files["v1-r1/qualification.json"].startswith(b"{")
