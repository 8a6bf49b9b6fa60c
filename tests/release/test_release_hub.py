"""Publication to a stand-in of the Hub through the real client (B217, B223, B224, B226, B228, B230)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.model.errors import (
    ConflictError,
    IntegrityError,
    OciBuilderError,
    PolicyError,
    SpecError,
    TransportError,
)
from oci_builder.model.events import Event
from oci_builder.publish import Judge, Publication, publish
from oci_builder.qualification import Rules, check_release, update_release
from oci_builder.release.host import utc_now
from oci_builder.release.parts import Part, hash_parts, plan_parts
from oci_builder.release.publish import HubTarget, commit_files, fetch_files
from oci_builder.release.receipts import Answer, judge
from oci_builder.release.signing import load_public, save_key
from tests.lab.hub import TOKEN, FakeHub, Request, times
from tests.lab.hub import Answer as Reply
from tests.release.built import KEY, make_build, make_release, make_spec, publication, recorded_by_hand
from tests.release.helpers import DOCKER, OCI, PORTABLE, policy, trusted

pytest.importorskip("huggingface_hub")
pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as made:
        yield made


def target(hub: FakeHub, **changes: object) -> HubTarget:
    values = {"repo": "o/r", "endpoint": hub.url, "xet": False, "env": {"HF_TOKEN": TOKEN, "HF_HOME": "/nonexistent"}}
    return HubTarget(**{**values, **changes})  # type: ignore[arg-type]


def parts_of(folder: Path, **sizes: int) -> list[Part]:
    out: list[Part] = []
    for name, size in sizes.items():
        (folder / name).write_bytes(os.urandom(size))
        out += hash_parts(plan_parts(name, folder / name))[1]
    return out


def test_files_arrive_and_are_read_back_by_hash(hub: FakeHub, tmp_path: Path) -> None:
    parts = parts_of(tmp_path, small=100, big=5000, empty=0)
    events: list[Event] = []
    done = commit_files(target(hub), parts, "first", events.append)
    assert {k: hashlib.sha256(v).hexdigest() for k, v in hub.files.items()} == {p.name: p.sha256 for p in parts}
    assert done["commit"] == hub.commits[-1][0]
    assert {e.task for e in events} >= {"upload big", "verify big", "verify small"}


def test_the_commit_names_its_parent(hub: FakeHub, tmp_path: Path) -> None:
    commit_files(target(hub), parts_of(tmp_path, a=2000), "m")
    header = json.loads(hub.sent("POST", "/commit/")[0].body.splitlines()[0])
    assert header["value"]["parentCommit"] == "0" * 40


def test_a_moved_head_costs_one_retry_and_loses_nothing_b228(hub: FakeHub, tmp_path: Path) -> None:
    moved = []

    def move(request: Request) -> None:
        if "/commit/" in request.path and not moved:
            moved.append(hub.add_commit({"README.md": b"theirs"}))

    hub.faults.append(move)
    commit_files(target(hub), parts_of(tmp_path, a=2000), "m")
    assert (len(hub.sent("POST", "/commit/")), sorted(hub.files)) == (2, ["README.md", "a"])


def test_a_head_that_always_moves_ends_in_a_conflict(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(lambda r: Reply(412, b"{}") if "/commit/" in r.path else None)
    with pytest.raises(ConflictError) as caught:
        commit_files(target(hub), parts_of(tmp_path, a=2000), "m")
    assert caught.value.code == "hub.conflict"


def test_other_content_under_the_same_name_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    for before in (os.urandom(2000), b"small"):
        hub.add_commit({"a": before})
        with pytest.raises(ConflictError) as caught:
            commit_files(target(hub), parts_of(tmp_path, a=2000), "m")
        assert (caught.value.code, hub.files["a"]) == ("release.exists", before)


def test_doing_it_twice_changes_and_sends_nothing(hub: FakeHub, tmp_path: Path) -> None:
    parts = parts_of(tmp_path, a=2000, b=50)
    first = commit_files(target(hub), parts, "m")
    sent = len(hub.sent("PUT", "/put/"))
    assert commit_files(target(hub), parts, "m")["commit"] == first["commit"]
    assert (len(hub.commits), len(hub.sent("PUT", "/put/"))) == (2, sent)


def test_what_arrived_is_not_sent_again_b224(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(os.urandom(50_000))
    _, parts = hash_parts(plan_parts("x", tmp_path / "x", max_file=10_000, part_size=10_000))
    third = f"/put/{parts[2].sha256}"
    hub.faults.append(times(99, lambda r: third in r.path, Reply(403, b"no")))
    with pytest.raises(TransportError):
        commit_files(target(hub), list(parts), "m")
    assert len(hub.commits) == 1
    hub.faults.clear()
    hub.log.clear()
    commit_files(target(hub), list(parts), "m")
    assert [r.path.rsplit("/", 1)[1] for r in hub.sent("PUT", "/put/")] == [p.sha256 for p in parts[2:]]


def test_a_server_error_is_retried(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(times(1, lambda r: "/put/" in r.path, Reply(500)))
    hub.faults.append(times(1, lambda r: "/batch" in r.path, Reply(503)))
    commit_files(target(hub), parts_of(tmp_path, a=2000), "m")
    assert len(hub.sent("PUT", "/put/")) == 2


def test_multipart_uploads_work(hub: FakeHub, tmp_path: Path) -> None:
    hub.chunk = 700
    (part,) = parts_of(tmp_path, a=3000)
    commit_files(target(hub), [part], "m")
    assert hashlib.sha256(hub.files["a"]).hexdigest() == part.sha256


def test_a_dropped_download_is_resumed(hub: FakeHub, tmp_path: Path) -> None:
    (part,) = parts_of(tmp_path, a=100_000)
    data = part.source.read_bytes()
    hub.faults.append(times(1, lambda r: "/get/" in r.path, Reply(200, data, cut=60_000)))
    commit_files(target(hub), [part], "m")
    assert "range" in hub.sent("GET", "/get/")[-1].headers


def test_a_download_that_breaks_often_but_advances_ends_well(hub: FakeHub, tmp_path: Path) -> None:
    (part,) = parts_of(tmp_path, a=90_000)
    data = part.source.read_bytes()

    def drip(request: Request) -> Reply | None:
        if "/get/" not in request.path:
            return None
        at = int(request.headers.get("range", "bytes=0-")[6:-1])
        span = {"Content-Range": f"bytes {at}-{len(data) - 1}/{len(data)}"}
        return Reply(206 if at else 200, data[at:], span if at else {}, cut=12_000)

    hub.faults.append(drip)
    commit_files(target(hub), [part], "m")
    assert len(hub.sent("GET", "/get/")) == 8


def test_another_range_than_asked_for_is_not_spliced(hub: FakeHub, tmp_path: Path) -> None:
    (part,) = parts_of(tmp_path, a=90_000)
    data = part.source.read_bytes()
    wrong = Reply(206, data[50_000:], {"Content-Range": f"bytes 50000-{len(data) - 1}/{len(data)}"})
    hub.faults.append(times(1, lambda r: "/get/" in r.path, Reply(200, data, cut=60_000)))
    hub.faults.append(times(1, lambda r: "/get/" in r.path, wrong))
    commit_files(target(hub), [part], "m")
    assert len(hub.sent("GET", "/get/")) == 3


@pytest.mark.parametrize("flip", [0, 50_000, 99_999])
def test_same_size_other_bytes_fail_b226(hub: FakeHub, tmp_path: Path, flip: int) -> None:
    (part,) = parts_of(tmp_path, a=100_000)
    bad = bytearray(part.source.read_bytes())
    bad[flip] ^= 1
    hub.faults.append(lambda r: Reply(200, bytes(bad)) if "/get/" in r.path else None)
    with pytest.raises(IntegrityError) as caught:
        commit_files(target(hub), [part], "m")
    assert caught.value.code == "blob.digest"


def test_a_fetch_keeps_only_what_has_the_right_hash_b226(hub: FakeHub, tmp_path: Path) -> None:
    good, bad = parts_of(tmp_path, good=3000, bad=3000)
    commit = hub.add_commit({"good": good.source.read_bytes(), "bad": bytes(3000)})
    (tmp_path / "dest").mkdir()
    with pytest.raises(IntegrityError):
        fetch_files(target(hub), [good, bad], commit, tmp_path / "dest")
    assert os.listdir(tmp_path / "dest") == ["good"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_says_what_to_do_and_is_not_shown(hub: FakeHub, tmp_path: Path, status: int) -> None:
    hub.faults.append(lambda r: Reply(status, json.dumps({"error": f"bad {TOKEN}"}).encode()))
    with pytest.raises(TransportError) as caught:
        commit_files(target(hub), parts_of(tmp_path, a=10), "m")
    assert (caught.value.code, TOKEN in repr(caught.value)) == ("auth", False)


def test_a_token_that_ends_in_a_newline_is_taken(hub: FakeHub, tmp_path: Path) -> None:
    parts = parts_of(tmp_path, a=3000)
    commit_files(target(hub, env={"HF_TOKEN": TOKEN + "\n", "HF_HUB_DISABLE_XET": "1"}), parts, "m")
    with pytest.raises(SpecError) as caught:
        commit_files(target(hub, env={"HF_TOKEN": "one\ntwo"}), parts, "m")
    assert caught.value.code == "spec.token" and "two" not in caught.value.message


def test_no_secret_is_in_an_error(hub: FakeHub, tmp_path: Path) -> None:
    """The token echoed by the server, and a signed upload link."""
    echo = Reply(400, json.dumps({"error": f"you sent {TOKEN}"}).encode(), {"X-Error-Message": TOKEN})
    hub.faults.append(lambda r: echo if "/put/" in r.path else None)
    with pytest.raises(OciBuilderError) as caught:
        commit_files(target(hub), parts_of(tmp_path, a=2000), "m")
    text = f"{caught.value!r} {caught.value.fields}"
    assert (TOKEN in text, "s3cr3t" in text) == (False, False)


def test_a_proxy_password_is_in_no_error(hub: FakeHub, tmp_path: Path) -> None:
    env = {"HF_TOKEN": TOKEN, "HTTP_PROXY": "http://me:pr0xypass@127.0.0.1:9", "NO_PROXY": "", "no_proxy": ""}
    with pytest.raises(TransportError) as caught:
        commit_files(target(hub, env=env), parts_of(tmp_path, a=10), "m")
    assert ("pr0xypass" in repr(caught.value), hub.log) == (False, [])


def test_a_proxy_that_refuses_the_password_does_not_show_it(hub: FakeHub, tmp_path: Path) -> None:
    """The stand-in as a proxy that answers 407 and quotes what it got."""
    hub.faults.append(lambda r: Reply(407, r.headers.get("proxy-authorization", "none").encode()))
    env = {"HF_TOKEN": TOKEN, "HTTP_PROXY": hub.url.replace("//", "//me:pr0xypass@"), "NO_PROXY": "", "no_proxy": ""}
    with pytest.raises(TransportError) as caught:
        commit_files(target(hub, env=env, endpoint="http://hub.invalid"), parts_of(tmp_path, a=10), "m")
    text = repr(caught.value)
    assert ("pr0xypass" in text, "bWU6cHIweHlwYXNz" in text, "407" in text) == (False, False, True)


def test_a_file_that_changes_after_it_was_hashed_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    (part,) = parts_of(tmp_path, a=2000)
    part.source.write_bytes(bytes(2000))
    with pytest.raises(OciBuilderError):
        commit_files(target(hub), [part], "m")
    assert len(hub.commits) == 1


def test_a_file_that_went_away_is_no_fault_of_the_network(hub: FakeHub, tmp_path: Path) -> None:
    parts = parts_of(tmp_path, a=3000)
    parts[0].source.unlink()
    with pytest.raises(TransportError) as caught:
        commit_files(target(hub), parts, "m")
    assert caught.value.code == "io.error" and parts[0].source.name in caught.value.message


def test_only_the_subprocess_goes_online(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent may be offline, and does not even import the client."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    commit_files(target(hub), parts_of(tmp_path, a=10), "m")
    code = "import sys, oci_builder.publish; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class TestParts:
    def test_a_file_over_the_limit_is_split_before_any_work_b223(self, tmp_path: Path) -> None:
        with open(tmp_path / "x", "wb") as file:
            file.truncate(51_000_000_000)
        assert [(p.name, p.size) for p in plan_parts("x", tmp_path / "x")] == [
            ("x.part000", 40_000_000_000),
            ("x.part001", 11_000_000_000),
        ]

    def test_twelve_parts_join_with_plain_cat_b230(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(os.urandom(11_500))
        whole, parts = hash_parts(plan_parts("x", tmp_path / "x", max_file=5000, part_size=1000))
        for part in parts:
            data = (tmp_path / "x").read_bytes()[part.offset : part.offset + part.size]
            (tmp_path / part.name).write_bytes(data)
            assert hashlib.sha256(data).hexdigest() == part.sha256
        joined = subprocess.run(["sh", "-c", "cat x.part* | sha256sum"], cwd=tmp_path, capture_output=True, text=True)
        assert (len(parts), joined.stdout.split()[0]) == (12, whole)

    @pytest.mark.parametrize(("limit", "size"), [(10, 11), (10, 0), (10, 1)])
    def test_sizes_that_make_no_sense_are_refused(self, tmp_path: Path, limit: int, size: int) -> None:
        (tmp_path / "x").write_bytes(bytes(2000))
        with pytest.raises(SpecError) as caught:
            plan_parts("x", tmp_path / "x", max_file=limit, part_size=size)
        assert caught.value.code == "publish.parts"

    def test_a_file_that_is_not_the_recorded_one_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"x")
        with pytest.raises(IntegrityError) as caught:
            hash_parts(plan_parts("x", tmp_path / "x"), "0" * 64)
        assert caught.value.code == "blob.digest"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    make_release(place)
    return place


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
