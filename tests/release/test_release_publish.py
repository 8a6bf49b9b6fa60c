"""A release is published to the lab's hub: from its records to the delivery receipt."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.model.errors import (
    IntegrityError,
    PolicyError,
    SpecError,
    TransportError,
)
from oci_builder.publish import Judge, Publication, publish
from oci_builder.qualification import Rules, check_release, update_release
from oci_builder.release.host import utc_now
from oci_builder.release.publish import HubTarget
from oci_builder.release.receipts import Answer, judge
from oci_builder.release.signing import load_public, save_key
from tests.lab.hub import TOKEN, FakeHub, Request, times
from tests.lab.hub import Answer as Reply
from tests.release.built import KEY, make_build, make_spec, publication, recorded_by_hand
from tests.release.helpers import DOCKER, OCI, PORTABLE, policy, trusted
from tests.release.hubcase import target

pytest.importorskip("huggingface_hub")
pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")


@pytest.fixture
def release(made: Path, tmp_path: Path) -> Publication:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return publication(tmp_path)


def test_a_release_is_published_and_verified_from_the_published_bytes_b217(
    hub: FakeHub, release: Publication, tmp_path: Path
) -> None:
    delivery = publish(release, target(hub))
    published = {n.removeprefix("v1-r1/"): d for n, d in hub.files.items()}
    expected = {"README.md", "SHA256SUMS", f"{PORTABLE}.part000", f"{OCI}.part002", "a.cdx.json"}
    assert set(published) >= expected
    trust = policy(trusted(KEY, not_after="2099-01-01T00:00:00Z"))
    assert load_public(save_key(KEY, tmp_path / "k")) == KEY.public
    envelope = published[f"receipts/{delivery.receipt.name}"]
    verdict = judge(envelope, trust, now=utc_now(), subjects=release.folder.subjects())
    assert (verdict.answer, verdict.reasons) == (Answer.VERIFIED, ())
    assert verdict.statement is not None
    details = verdict.statement.predicate.details
    assert (details["commit"], details["helper"]["sha256"]) == (
        delivery.commit, hashlib.sha256(b"#!/bin/bash\n").hexdigest(),
    )  # fmt: skip
    for file in details["files"]:
        assert hashlib.sha256(hub.files[file["name"]]).hexdigest() == file["sha256"]


def test_the_card_and_the_delivery_receipt_come_last(hub: FakeHub, release: Publication) -> None:
    delivery = publish(release, target(hub))
    first, second = (set(hub.commits[i][1]) for i in (1, 2))
    assert second - first == {"README.md", f"v1-r1/receipts/{delivery.receipt.name}"}
    assert not any("qualification" in name for name in first)
    assert delivery.commit in hub.files["README.md"].decode()


def test_published_checksums_hold(hub: FakeHub, release: Publication, tmp_path: Path) -> None:
    publish(release, target(hub))
    for name, data in hub.files.items():
        place = tmp_path / "fetched" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    folder = tmp_path / "fetched" / "v1-r1"
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def test_an_archive_that_is_not_the_recorded_one_is_not_published(hub: FakeHub, release: Publication) -> None:
    (release.archives / OCI).write_bytes(bytes(3000))
    with pytest.raises(IntegrityError):
        publish(release, target(hub))
    assert not hub.log


def test_a_failed_publication_leaves_no_receipt_and_can_be_repeated(hub: FakeHub, release: Publication) -> None:
    hub.faults.append(times(1, lambda r: "/commit/" in r.path, Reply(400, b"{}")))
    with pytest.raises(TransportError):
        publish(release, target(hub))
    assert not list(release.folder.receipts.glob("publish-*"))
    archives = {hashlib.sha256(r.body).hexdigest() for r in hub.sent("PUT", "/put/")}
    hub.log.clear()
    publish(release, target(hub))
    assert not archives & {hashlib.sha256(r.body).hexdigest() for r in hub.sent("PUT", "/put/")}


def kill_upload_process() -> None:
    """The child that alone is online, as the kernel does when memory is short."""
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if b"oci_builder.release.hub" in Path("/proc", pid, "cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/task", str(os.getpid()), "children").exists(), reason="no list of children")
@pytest.mark.parametrize("where", ["/put/", "/commit/", "/resolve/"])
def test_an_upload_that_is_killed_is_resumed_b224(hub: FakeHub, release: Publication, where: str) -> None:
    """Between two parts, before the commit, or while it is read back: the same command again ends it well."""
    seen = {"calls": 0}

    def fault(request: Request) -> Reply | None:
        seen["calls"] += where in request.path
        if where in request.path and seen["calls"] == (1 if where == "/commit/" else 3):
            kill_upload_process()
        return None

    hub.faults.append(fault)
    with pytest.raises(TransportError) as caught:
        publish(release, target(hub))
    assert caught.value.code == "hub.died" and "-9" in caught.value.message
    assert not list(release.folder.receipts.glob("publish-*"))
    hub.faults.clear()
    arrived = {hashlib.sha256(r.body).hexdigest() for r in hub.sent("PUT", "/put/")[:2]}
    hub.log.clear()
    delivery = publish(release, target(hub))
    assert not arrived & {hashlib.sha256(r.body).hexdigest() for r in hub.sent("PUT", "/put/")}
    assert delivery.commit in hub.files["README.md"].decode()
    for name, sha256 in release.folder.subjects().items():
        joined = b"".join(data for part, data in sorted(hub.files.items()) if part.startswith(f"v1-r1/{name}"))
        assert hashlib.sha256(joined).hexdigest() == sha256


def test_no_token_is_in_anything_that_was_written(hub: FakeHub, release: Publication, tmp_path: Path) -> None:
    publish(release, target(hub))
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert TOKEN.encode() not in written + b"".join(hub.files.values())


def test_a_secret_in_a_layer_stops_it_before_anything_is_sent(hub: FakeHub, tmp_path: Path) -> None:
    token = "hf_" + "qWeRtYuIoPaSdFgHjKlZxCvBnMqWeRtYuI"
    make_spec(tmp_path)
    (tmp_path / "envs/a/settings.py").write_text(f"TOKEN = '{token}'\n")
    build(tmp_path / "spec.json", tmp_path / "dist", BuildOptions(tmp_path / "cache"))
    with pytest.raises(PolicyError) as caught:
        publish(recorded_by_hand(tmp_path), target(hub))
    assert caught.value.code == "policy.secret"
    assert "settings.py" in caught.value.message and token not in caught.value.message
    assert not hub.log


def test_weights_in_a_layer_stop_it_before_anything_is_sent(hub: FakeHub, tmp_path: Path) -> None:
    make_spec(tmp_path)
    (tmp_path / "envs/a/model.safetensors").write_bytes(bytes(17 << 20))
    build(tmp_path / "spec.json", tmp_path / "dist", BuildOptions(tmp_path / "cache"))
    with pytest.raises(PolicyError) as caught:
        publish(recorded_by_hand(tmp_path), target(hub))
    assert (caught.value.code, hub.log) == ("policy.weights", [])


def test_a_secret_in_the_image_s_settings_stops_it(hub: FakeHub, tmp_path: Path) -> None:
    """A variable of the spec lands in the config, which every registry shows to everybody."""
    token = "hf_" + "qWeRtYuIoPaSdFgHjKlZxCvBnMqWeRtYuI"
    make_build(tmp_path, env=[f"HF_TOKEN={token}"])
    with pytest.raises(PolicyError) as caught:
        publish(recorded_by_hand(tmp_path), target(hub))
    assert "image config" in caught.value.message and token not in caught.value.message


def test_a_secret_in_the_helper_stops_it(hub: FakeHub, release: Publication) -> None:
    release.helper.write_text("export TOKEN=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\n")
    with pytest.raises(PolicyError):
        publish(release, target(hub))
    assert not hub.log


def test_the_verdict_after_the_delivery_is_recorded_and_published(hub: FakeHub, release: Publication) -> None:
    """The delivery receipt joins the folder, the verdict follows it, and nothing else there changes."""
    place = release.folder.root.parent.parent
    rules = Rules.load(place / "spec.json", place / "trust.json")
    update_release(release.folder.root, rules, utc_now())
    before = {p.name: p.read_bytes() for p in release.folder.root.iterdir() if p.is_file()}
    publish(replace(release, judge=Judge(rules.gates, rules.policy, rules.spec)), target(hub))
    assert check_release(release.folder.root, rules)["gates"][0]["state"] == "met"
    verdict = (release.folder.root / "qualification.json").read_bytes()
    assert hub.files["v1-r1/qualification.json"] == verdict
    after = {p.name: p.read_bytes() for p in release.folder.root.iterdir() if p.is_file()}
    assert {n for n in after if after[n] != before.get(n)} == {"qualification.json", "qualification.1.json"}
    assert after["qualification.1.json"] == before["qualification.json"]


def test_the_card_says_how_far_it_was_proved(hub: FakeHub, release: Publication) -> None:
    place = release.folder.root.parent.parent
    rules = Rules.load(place / "spec.json", place / "trust.json")
    publish(release, target(hub))
    assert "Not judged" in hub.files["README.md"].decode()
    publish(replace(release, judge=Judge(rules.gates, rules.policy, rules.spec)), target(hub))
    card = hub.files["README.md"].decode()
    assert "1 of 1 gates met" in card and "- 8B runs" in card and "candidate" in card


def test_the_card_s_own_commands_join_the_parts(hub: FakeHub, release: Publication, tmp_path: Path) -> None:
    publish(release, target(hub))
    fetched = tmp_path / "fetched"
    for name, data in hub.files.items():
        (fetched / name).parent.mkdir(parents=True, exist_ok=True)
        (fetched / name).write_bytes(data)
    script = hub.files["README.md"].decode().split("```sh\n")[1].split("```")[0]
    done = subprocess.run(["sh", "-e", "-c", script], cwd=fetched / "v1-r1", capture_output=True, text=True)
    assert (done.returncode, sorted(done.stdout.split())) == (
        0,
        sorted(["OK"] * 3 + [f"{n}:" for n in (PORTABLE, OCI, DOCKER)]),
    )


@pytest.mark.parametrize(
    "repo", ["", "x", "a b/c", "a/b/c", "-a/b", "a/b.", "a/..", "a--b/c", "a/b?token=x", "https://h/a"]
)
def test_a_name_that_is_no_dataset_is_refused_before_any_work(repo: str) -> None:
    with pytest.raises(SpecError) as caught:
        HubTarget(repo)
    assert caught.value.code == "spec.repo"


def test_a_helper_that_is_not_there_is_refused_before_any_work(release: Publication) -> None:
    with pytest.raises(SpecError) as caught:
        replace(release, helper=release.helper.with_name("none"))
    assert caught.value.code == "publish.helper"


@pytest.mark.parametrize("name", ["receipts/x.json", "inventory-x.json", "z.cdx.json", "readiness.json"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_nothing_from_elsewhere_is_published_through_a_release(
    hub: FakeHub, release: Publication, tmp_path: Path, name: str, kind: str
) -> None:
    (tmp_path / "private.json").write_text('{"mine": true}')
    if kind == "link":
        (release.folder.root / name).symlink_to(tmp_path / "private.json")
    else:
        os.mkfifo(release.folder.root / name)
    with pytest.raises(PolicyError) as caught:
        publish(release, target(hub))
    assert (caught.value.code, hub.log) == ("release.link", [])
