"""Repack: packaging files only, the original kept, a qualified release refused, the qualification starts again."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import CheckFailed, ConflictError, OciBuilderError, SpecError, TransportError
from oci_builder.model.gates import parse_gates
from oci_builder.release.files import create_exclusively
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.host import utc_now
from oci_builder.release.receipts import Answer, judge, write_receipt
from oci_builder.repack import Repacked, RepackRequest, repack
from tests.release.helpers import DOCKER, OCI, PORTABLE, checks, new_key, policy, receipt, trusted

KEY = new_key()
POLICY = policy(trusted(KEY, not_before="2020-01-01T00:00:00Z", not_after="2099-01-01T00:00:00Z"))
GATES = parse_gates([{"name": "g", "stage": "container", "checks": ["ok"]}])
MARKER = b"opt/rt/runtime.json"
PACKAGING = frozenset({b"opt/rt/activate.sh", b"opt/rt/check_runtime.py", b"opt/rt/new.sh"})
FILES: dict[str, bytes] = {
    "opt/rt/runtime.json": b'{"name": "x", "release": "v1-r1"}',
    "opt/rt/activate.sh": b"echo 1\n",
    "opt/rt/envs/base/lib/libtorch.so": os.urandom(5000),
}
LAYERS = [{"name": "base", "digest": "sha256:" + "1" * 64}, {"name": "runtime", "digest": "sha256:" + "2" * 64}]


def write_build(place: Path, files: dict[str, bytes], layers: list[dict[str, str]], mode: int = 0o644) -> None:
    """Archives and records as a build leaves them; the image archives are only bytes here."""
    place.mkdir(exist_ok=True)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode if name.endswith(".so") else 0o644
            tar.addfile(entry, io.BytesIO(data))
    (place / PORTABLE).write_bytes(gzip.compress(plain.getvalue(), mtime=0))
    shas = {}
    for name in (OCI, DOCKER):
        (place / name).write_bytes(name.encode() + repr(layers).encode())
        shas[name] = {"sha256": hashlib.sha256((place / name).read_bytes()).hexdigest()}
    sha = hashlib.sha256((place / PORTABLE).read_bytes()).hexdigest()
    (place / "portable.json").write_text(json.dumps({"sha256": sha, "name": "x", "release": "v1-r1"}))
    (place / "container.json").write_text(json.dumps({"layers": layers, "archives": shas}))


@pytest.fixture
def request_(tmp_path: Path) -> RepackRequest:
    write_build(tmp_path / "dist", FILES, LAYERS)
    folder = ReleaseFolder(tmp_path / "releases" / "v1-r1").create()
    for name in ("portable.json", "container.json"):
        folder.add(name, (tmp_path / "dist" / name).read_bytes())
    return RepackRequest(tmp_path / "dist", folder, GATES, POLICY, MARKER, PACKAGING, frozenset({"runtime"}), KEY)


def run(
    what: RepackRequest, changes: dict[str, bytes | None], *, layers: list[dict[str, str]] | None = None, **kw: Any
) -> Repacked:
    files = {n: d for n, d in {**FILES, **changes}.items() if d is not None}
    new_layers = layers or [LAYERS[0], {"name": "runtime", "digest": "sha256:" + "3" * 64}]

    def rebuild(place: Path) -> None:
        write_build(place, files, new_layers, kw.get("mode", 0o644))

    outcome = kw.get("outcome", "pass")
    return repack(what, rebuild, lambda _: checks(imports=outcome) if outcome else (), utc_now())


def everything(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_packaging_file_is_repaired_and_the_original_kept(request_: RepackRequest) -> None:
    before = everything(request_.dist)
    done = run(request_, {"opt/rt/activate.sh": b"echo 2\n", "opt/rt/new.sh": b"new\n"})
    assert (done.changes.changed, done.changes.added) == ((b"opt/rt/activate.sh",), (b"opt/rt/new.sh",))
    assert hashlib.sha256((request_.dist / PORTABLE).read_bytes()).hexdigest() == done.sha256
    assert everything(done.previous) == before
    assert request_.folder.subjects()[PORTABLE] == done.sha256


def test_old_receipts_no_longer_count(request_: RepackRequest) -> None:
    """Even when a receipt of the original is copied beside the new ones."""
    old = request_.folder.subjects()
    failed = receipt(checks=checks(ok="fail"))
    path = write_receipt(request_.folder.receipts, failed, old, KEY)
    passed = write_receipt(request_.folder.root, receipt(), old, KEY).read_bytes()
    run(request_, {"opt/rt/activate.sh": b"echo 2\n"})
    (request_.folder.receipts / "copied.json").write_bytes(passed)
    found = request_.folder.evaluate(GATES, POLICY, utc_now(), None)
    assert (found.state, [r["receipt"] for r in found.refused]) == ("candidate", ["copied.json"])
    assert not (request_.folder.receipts / path.name).exists()


def test_the_replaced_candidate_is_kept_and_says_so(request_: RepackRequest) -> None:
    old = request_.folder.subjects()[PORTABLE]
    done = run(request_, {"opt/rt/activate.sh": b"echo 2\n"})
    kept = ReleaseFolder(request_.folder.root / "superseded" / old[:12])
    found = kept.evaluate(GATES, POLICY, utc_now(), None)
    assert (found.state, found.candidate.superseded_by, kept.release) == ("superseded", done.sha256, "v1-r1")


def test_a_second_repack_keeps_both(request_: RepackRequest) -> None:
    run(request_, {"opt/rt/activate.sh": b"echo 2\n"})
    run(request_, {"opt/rt/activate.sh": b"echo 3\n"})
    assert len(list((request_.folder.root / "superseded").iterdir())) == 2


@pytest.mark.parametrize(
    ("changes", "extra", "code"),
    [
        ({"opt/rt/envs/base/lib/libtorch.so": b"x"}, {}, "repack.scope"),
        ({"opt/rt/envs/base/lib/libtorch.so": None}, {}, "repack.scope"),
        ({"opt/rt/envs/base/evil.pth": b"x"}, {}, "repack.scope"),
        ({"opt/rt/activate.sh": b"echo 2\n"}, {"mode": 0o755}, "repack.scope"),
        ({"opt/rt/activate.sh": b"2"}, {"layers": [{"name": "base", "digest": "sha256:" + "9" * 64}]}, "repack.scope"),
        ({}, {}, "repack.nothing"),
        ({"opt/rt/activate.sh": b"2", "opt/rt/runtime.json": None}, {}, "repack.marker"),
        ({"opt/rt/activate.sh": b"2", "opt/rt/runtime.json": b'{"name": "y"}'}, {}, "repack.marker"),
        ({"opt/rt/activate.sh": b"2"}, {"outcome": "fail"}, "repack.preflight"),
        ({"opt/rt/activate.sh": b"2"}, {"outcome": "skipped"}, "repack.preflight"),
        ({"opt/rt/activate.sh": b"2"}, {"outcome": ""}, "repack.preflight"),
    ],
)
def test_what_is_refused_changes_nothing(
    request_: RepackRequest, tmp_path: Path, changes: dict[str, bytes | None], extra: dict[str, Any], code: str
) -> None:
    before = everything(request_.dist), everything(request_.folder.root)
    with pytest.raises(OciBuilderError) as caught:
        run(request_, changes, **extra)
    assert caught.value.code == code
    assert (everything(request_.dist), everything(request_.folder.root)) == before
    left = [n for n in os.listdir(tmp_path) if "repack" in n]
    assert bool(left) is (code == "repack.preflight")
    assert isinstance(caught.value, CheckFailed) is (code == "repack.preflight")


def test_checks_that_the_new_build_would_lack_are_missed_before_it_is_built(request_: RepackRequest) -> None:
    """A rebuild takes minutes; what it will be tried with is known before."""
    lacking = replace(request_, needed=frozenset({b"opt/rt/checks.json"}))
    built: list[Path] = []
    with pytest.raises(SpecError) as caught:
        repack(lacking, built.append, lambda _: (), utc_now())
    assert (caught.value.code, built) == ("repack.checks", [])
    shipped = replace(lacking, packaging=lacking.packaging | {b"opt/rt/checks.json"})
    assert run(shipped, {"opt/rt/checks.json": b"[]"}).changes.added == (b"opt/rt/checks.json",)


def test_a_deferred_check_does_not_stop_it(request_: RepackRequest) -> None:
    done = run(request_, {"opt/rt/activate.sh": b"echo 2\n"}, outcome="deferred")
    assert done.changes.changed == (b"opt/rt/activate.sh",)
    assert request_.folder.subjects()[PORTABLE] == done.sha256


def test_a_qualified_release_is_refused(request_: RepackRequest) -> None:
    write_receipt(request_.folder.receipts, receipt(), request_.folder.subjects(), KEY)
    with pytest.raises(ConflictError) as caught:
        run(request_, {"opt/rt/activate.sh": b"echo 2\n"})
    assert caught.value.code == "release.qualified"


@pytest.mark.parametrize("later", ["no keys", "another gate", "key revoked", "judged again"])
def test_a_release_that_was_qualified_once_is_refused_for_good(request_: RepackRequest, later: str) -> None:
    """What was recorded counts, whatever today's gates and keys would say."""
    folder = request_.folder
    write_receipt(folder.receipts, receipt(), folder.subjects(), KEY)
    folder.record(folder.evaluate(GATES, POLICY, utc_now(), None))
    more = parse_gates([{"name": n, "stage": "container", "checks": [n]} for n in ("ok", "new")])
    revoked = policy(trusted(KEY, not_before="2020-01-01T00:00:00Z", revoked="stolen"))
    changes: dict[str, Any] = {"gates": more} if later == "another gate" else {"policy": policy()}
    changes = {"policy": revoked} if later == "key revoked" else changes
    if later == "judged again":
        folder.record(folder.evaluate(GATES, policy(), utc_now(), None))
        assert (folder.recorded() or {})["state"] == "candidate"
    before = everything(request_.dist), everything(folder.root)
    with pytest.raises(ConflictError) as caught:
        run(replace(request_, **changes), {"opt/rt/activate.sh": b"echo 2\n"})
    assert caught.value.code == "release.qualified"
    assert (everything(request_.dist), everything(folder.root)) == before


def test_a_release_that_is_qualified_while_a_repack_runs_is_refused(request_: RepackRequest) -> None:
    folder = request_.folder

    def preflight(_: Path) -> Any:
        write_receipt(folder.receipts, receipt(), folder.subjects(), KEY)
        return checks(imports="pass")

    def rebuild(place: Path) -> None:
        write_build(place, {**FILES, "opt/rt/activate.sh": b"2"}, LAYERS)

    with pytest.raises(ConflictError) as caught:
        repack(request_, rebuild, preflight, utc_now())
    assert caught.value.code == "release.qualified"


def test_an_original_that_is_not_the_recorded_one_is_refused(request_: RepackRequest) -> None:
    with open(request_.dist / PORTABLE, "ab") as file:
        file.write(b"x")
    with pytest.raises(OciBuilderError) as caught:
        run(request_, {"opt/rt/activate.sh": b"echo 2\n"})
    assert caught.value.code in ("blob.digest", "blob.size")


def test_another_build_than_the_release_folder_s_is_refused(request_: RepackRequest) -> None:
    write_build(request_.dist, {**FILES, "opt/rt/activate.sh": b"other"}, LAYERS)
    with pytest.raises(OciBuilderError) as caught:
        run(request_, {"opt/rt/activate.sh": b"echo 2\n"})
    assert caught.value.code == "blob.digest"


def test_a_rebuild_that_fails_leaves_nothing(request_: RepackRequest, tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path))

    def broken(place: Path) -> None:
        (place / "part").write_text("x")
        raise CheckFailed("check.exit", "no")

    with pytest.raises(CheckFailed):
        repack(request_, broken, lambda _: checks(a="pass"), utc_now())
    assert sorted(os.listdir(tmp_path)) == before


def test_records_that_cannot_be_moved_put_the_original_back(
    request_: RepackRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(request_.dist)

    def full(*_: object) -> None:
        raise TransportError("io.space", "no space")

    monkeypatch.setattr("oci_builder.release.replacing.Replacing._records", full)
    with pytest.raises(TransportError):
        run(request_, {"opt/rt/activate.sh": b"echo 2\n"})
    assert everything(request_.dist) == before


def test_both_candidates_are_judged_afterwards(request_: RepackRequest) -> None:
    """The new digest begins as a candidate, the old one says by what it was replaced."""
    request_.folder.record(request_.folder.evaluate(GATES, POLICY, utc_now(), None))
    done = run(request_, {"opt/rt/activate.sh": b"echo 2\n"})
    kept = ReleaseFolder(next((request_.folder.root / "superseded").iterdir()))
    said = kept.compare(GATES, POLICY, None)
    assert (said["state"], said["superseded_by"]) == ("superseded", done.sha256)
    assert request_.folder.compare(GATES, POLICY, None)["state"] == "candidate"
    assert (kept.root / "qualification.1.json").is_file()


class Killed(BaseException):
    """The process ends here: nothing is tidied up."""


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the process die before its n-th rename or creation after the preflight."""
    left = [number]

    def dying(real: Any) -> Any:
        def one(*words: Any, **more: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return real(*words, **more)

        return one

    monkeypatch.setattr(Path, "rename", dying(Path.rename))
    monkeypatch.setattr(Path, "mkdir", dying(Path.mkdir))
    for name in ("_back", "end"):
        monkeypatch.setattr(f"oci_builder.release.replacing.Replacing.{name}", lambda _: None)
    monkeypatch.setattr("oci_builder.release.replacing.create_exclusively", dying(create_exclusively))


@pytest.mark.parametrize("number", range(13))
def test_a_run_that_is_killed_is_finished_by_the_next(
    request_: RepackRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Before every rename, and every file, of the replacement; an earlier repack's records stay as well."""
    run(request_, {"opt/rt/activate.sh": b"echo 2\n"})
    before = request_.folder.subjects()[PORTABLE]
    recorded: list[str] = []
    files = {**FILES, "opt/rt/activate.sh": b"echo 3\n"}
    layers = [LAYERS[0], {"name": "runtime", "digest": "sha256:" + "4" * 64}]

    def again(stop: int | None) -> Repacked:
        def rebuild(place: Path) -> None:
            write_build(place, files, layers)

        def preflight(_: Path) -> Any:
            if stop is not None:
                stop_at(monkeypatch, stop)
            return checks(imports="pass")

        return repack(request_, rebuild, preflight, utc_now(), after=lambda: recorded.append("yes"))

    with pytest.raises(Killed):
        again(number)
    monkeypatch.undo()
    done = again(None)
    assert request_.folder.subjects()[PORTABLE] == done.sha256 != before and recorded
    assert hashlib.sha256((request_.dist / PORTABLE).read_bytes()).hexdigest() == done.sha256
    assert hashlib.sha256((done.previous / PORTABLE).read_bytes()).hexdigest() == before
    assert len(list((request_.folder.root / "superseded").iterdir())) == 2
    assert request_.folder.compare(GATES, POLICY, None)["state"] == "candidate"
    assert judge(done.receipt.read_bytes(), POLICY, now=utc_now()).answer is Answer.VERIFIED
    assert not [p.name for p in (*tmp_path.iterdir(), *(tmp_path / "releases").iterdir()) if p.name.startswith(".")]


def test_what_a_killed_run_left_beside_the_build_is_removed(request_: RepackRequest, tmp_path: Path) -> None:
    (tmp_path / ".dist.repack-00000000").mkdir()
    (tmp_path / ".dist.repack-00000000/runtime.tar.gz").write_bytes(b"x")
    run(request_, {"opt/rt/activate.sh": b"echo 2\n"})
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_two_at_once_do_not_meet(request_: RepackRequest) -> None:
    def rebuild(place: Path) -> None:
        write_build(place, {**FILES, "opt/rt/activate.sh": b"2"}, LAYERS)

    def preflight(_: Path) -> Any:
        with pytest.raises(ConflictError) as caught:
            run(request_, {"opt/rt/activate.sh": b"echo 2\n"})
        assert caught.value.code == "repack.busy"
        return checks(imports="pass")

    repack(request_, rebuild, preflight, utc_now())
