"""Publication to a stand-in of the Hub through the real client (B217, B223, B224, B226, B228, B230)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oci_builder.model.errors import (
    ConflictError,
    IntegrityError,
    OciBuilderError,
    SpecError,
    TransportError,
)
from oci_builder.model.events import Event
from oci_builder.release.parts import Part, hash_parts, plan_parts
from oci_builder.release.publish import commit_files, fetch_files
from tests.lab.hub import TOKEN, FakeHub, Request, times
from tests.lab.hub import Answer as Reply
from tests.release.hubcase import target

pytest.importorskip("huggingface_hub")
pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")


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
