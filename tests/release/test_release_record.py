"""From a build to its release folder: what is recorded, what is refused (issue 7, items 3 and 6)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import CheckFailed, ConflictError, IntegrityError, OciBuilderError, PolicyError, SpecError
from oci_builder.model.receipts import PORTABLE, format_time
from oci_builder.qualification import Rules, check_release, update_release
from oci_builder.record import record
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.host import utc_now
from oci_builder.release.receipts import Answer, judge, write_receipt
from oci_builder.release.secrets import ScanOptions
from oci_builder.release.signing import new_key, save_key
from tests.lab.envelopes import statement_of
from tests.release.built import KEY, make_build, request
from tests.release.helpers import policy, receipt, trusted

pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("built")
    make_build(place)
    return place


@pytest.fixture
def place(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return tmp_path


def document(place: Path, name: str) -> Any:
    return json.loads((place / "releases/v1-r1" / name).read_text())


def provenance(place: Path) -> dict[str, Any]:
    return statement_of(place / "releases/v1-r1/provenance.json")


def test_the_folder_holds_records_inventories_bills_and_provenance(place: Path) -> None:
    done = record(request(place))
    assert set(done.files) == {
        "spec.json", "portable.json", "container.json", "provenance.json", "inventory-a.json", "inventory-b.json", "a.cdx.json",
        "b.cdx.json", "image.cdx.json",
    }  # fmt: skip
    assert {n: hashlib.sha256((done.folder / n).read_bytes()).hexdigest() for n in done.files} == done.files


def test_inventories_are_read_from_the_archive(place: Path) -> None:
    record(request(place))
    packages = {p["name"]: (p["version"], p["licence"]) for p in document(place, "inventory-b.json")["packages"]}
    assert packages == {"common": ("3.1", "Apache-2.0"), "own": ("2.0", "MIT")}


def test_the_image_s_bill_names_each_package_once_with_its_tiers(place: Path) -> None:
    record(request(place))
    bill = document(place, "image.cdx.json")
    assert bill["metadata"]["component"]["hashes"][0]["content"] == document(place, "container.json")["manifest"][
        "digest"
    ].removeprefix("sha256:")
    tiers = {
        (c["name"], c["version"]): [p["value"] for p in c["properties"] if p["name"] == "oci-builder:tier"]
        for c in bill["components"]
    }
    assert tiers == {("common", "3.1"): ["a", "b"], ("own", "1.0"): ["a"], ("own", "2.0"): ["b"]}


def test_provenance_names_the_image_and_the_archives(place: Path) -> None:
    record(request(place))
    subjects = {s["name"]: s["digest"]["sha256"] for s in provenance(place)["subject"]}
    container = document(place, "container.json")
    assert subjects[PORTABLE] == document(place, "portable.json")["sha256"]
    assert subjects[container["full_reference"]] == container["manifest"]["digest"].removeprefix("sha256:")
    assert set(container["archives"]) <= set(subjects)


def test_provenance_names_the_spec_and_says_what_has_no_digest(place: Path) -> None:
    record(request(place))
    definition = provenance(place)["predicate"]["buildDefinition"]
    spec = hashlib.sha256((place / "spec.json").read_bytes()).hexdigest()
    assert {"uri": "file:spec.json", "digest": {"sha256": spec}, "name": "spec"} in definition["resolvedDependencies"]
    assert [line.split(":")[0] for line in definition["internalParameters"]["unpinned"]] == [
        "tiers.a.path", "tiers.b.path",
    ]  # fmt: skip
    assert str(place) not in json.dumps(provenance(place))


def test_the_receipt_holds_the_digest_of_every_file(place: Path) -> None:
    done = record(request(place))
    assert done.receipt is not None
    trust = policy(trusted(KEY, not_after="2099-01-01T00:00:00Z"))
    verdict = judge(done.receipt.read_bytes(), trust, now=utc_now())
    assert verdict.answer is Answer.VERIFIED and verdict.statement is not None
    assert verdict.statement.predicate.details["files"] == done.files


def test_recording_again_changes_nothing(place: Path) -> None:
    done = record(request(place))
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in done.folder.rglob("*") if p.is_file()}
    assert record(request(place)).again
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in done.folder.rglob("*") if p.is_file()} == before


def test_another_build_never_takes_the_folder(place: Path, tmp_path: Path) -> None:
    done = record(request(place))
    before = {p: p.read_bytes() for p in done.folder.rglob("*") if p.is_file()}
    shutil.rmtree(place / "envs/a")
    shutil.rmtree(place / "envs/b")
    make_build(place)
    with pytest.raises(ConflictError) as caught:
        record(request(place))
    assert caught.value.code == "release.exists"
    assert {p: p.read_bytes() for p in done.folder.rglob("*") if p.is_file()} == before


def test_receipts_that_came_first_stay(place: Path) -> None:
    """A stage may have written its receipt before the folder was recorded."""
    early = place / "releases/v1-r1/receipts/early.json"
    early.parent.mkdir(parents=True)
    early.write_bytes(b"{}")
    record(request(place))
    assert early.read_bytes() == b"{}"


def test_an_interrupted_run_is_completed(place: Path) -> None:
    record(request(place))
    (place / "releases/v1-r1/portable.json").unlink()
    (place / "releases/v1-r1/a.cdx.json").write_bytes(b"half")
    shutil.rmtree(place / "releases/v1-r1/receipts")
    record(request(place))
    assert document(place, "a.cdx.json")["bomFormat"] == "CycloneDX"


def test_of_two_at_once_one_wins_and_the_folder_is_whole(place: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: record(request(place)), range(3)))
    assert sorted(d.again for d in done) == [False, True, True]
    assert len(list((place / "releases/v1-r1/receipts").iterdir())) == 1
    rules = Rules.load(place / "spec.json", place / "trust.json")
    update_release(place / "releases/v1-r1", rules, utc_now())
    assert check_release(place / "releases/v1-r1", rules)["refused"] == []


@pytest.mark.parametrize("name", ["runtime.oci.tar", "runtime.docker.tar.gz", "runtime.tar.gz"])
def test_an_archive_that_is_not_its_record_s_is_refused(place: Path, name: str) -> None:
    data = bytearray((place / "dist" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (place / "dist" / name).write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        record(request(place))
    assert caught.value.code == "blob.digest"
    assert not (place / "releases").exists()


@pytest.mark.parametrize(
    ("change", "code"),
    [({"tag": "u"}, "record.build"), ({"epoch": 1}, "record.build"), ({"release": "v2-r1"}, "release.name")],
)
def test_a_build_of_another_spec_is_refused(place: Path, change: dict[str, Any], code: str) -> None:
    value = json.loads((place / "spec.json").read_text())
    (place / "spec.json").write_text(json.dumps({**value, **change}))
    with pytest.raises(SpecError) as caught:
        record(request(place))
    assert caught.value.code == code


@pytest.mark.parametrize("missing", ["container.json", "portable.json", "runtime.oci.tar"])
def test_a_folder_that_is_no_finished_build_is_refused(place: Path, missing: str) -> None:
    (place / "dist" / missing).unlink()
    with pytest.raises(OciBuilderError) as caught:
        record(request(place))
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("name", ["bad name", "é", ".hidden", "a\nb"])
def test_a_folder_whose_name_is_none_for_a_release_is_refused(place: Path, name: str) -> None:
    wanted = request(place)
    with pytest.raises(SpecError) as caught:
        record(replace(wanted, folder=ReleaseFolder(place / "releases" / name)))
    assert caught.value.code == "release.name"


def test_a_secret_is_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    make_build(tmp_path, env=["HF_TOKEN=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"])
    with pytest.raises(PolicyError) as caught:
        record(request(tmp_path))
    assert caught.value.code == "policy.secret"
    assert not (tmp_path / "releases").exists()


def test_a_spec_s_files_and_lists_are_materials(tmp_path: Path) -> None:
    (tmp_path / "layers/files").mkdir(parents=True)
    (tmp_path / "layers/runtime.toml").write_text('name = "runtime"\n[[file]]\nfrom = "files/a.sh"\nto = "a.sh"\n')
    (tmp_path / "layers/files/a.sh").write_text("echo\n")
    make_build(tmp_path, files="layers")
    record(request(tmp_path))
    found = {m["uri"] for m in provenance(tmp_path)["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert found == {"file:spec.json", "file:layers/runtime.toml", "file:layers/files/a.sh"}


def test_another_key_makes_a_receipt_that_nobody_believes(place: Path) -> None:
    """Its folder is as good as unsigned: the verdict is kept, and the end says so."""
    record(request(place, new_key()))
    rules, folder = Rules.load(place / "spec.json", place / "trust.json"), place / "releases/v1-r1"
    with pytest.raises(CheckFailed) as updated:
        update_release(folder, rules, utc_now())
    with pytest.raises(CheckFailed) as checked:
        check_release(folder, rules)
    assert {updated.value.code, checked.value.code} == {"release.unproven"} and "inventory" in checked.value.message
    assert "unknown keys" in document(place, "qualification.json")["refused"][0]["reasons"][0]


@pytest.mark.parametrize("why", ["unknown", "revoked", "other stages", "expired"])
def test_a_key_whose_receipt_would_be_refused_records_nothing(place: Path, why: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "revoked": {"revoked": "stolen"}, "other stages": {"stages": ("single",)},
        "expired": {"not_before": "2020-01-01T00:00:00Z", "not_after": "2020-02-01T00:00:00Z"},
    }  # fmt: skip
    keys = trusted(KEY, **{"not_after": "2099-01-01T00:00:00Z", **changes.get(why, {})})
    signer = new_key() if why == "unknown" else KEY
    with pytest.raises(PolicyError) as caught:
        record(replace(request(place, signer), policy=policy(keys)))
    assert (caught.value.code, (place / "releases").exists()) == ("key.trust", False)


def test_a_release_without_its_record_receipt_never_passes(place: Path) -> None:
    """Else whoever removes the receipt may rewrite the rest."""
    spec = json.loads((place / "spec.json").read_text())
    gates = [{"name": "recorded", "stage": "extra", "checks": ["ok"]}]
    (place / "spec.json").write_text(json.dumps({**spec, "gates": gates}))
    done = record(request(place))
    rules, now = Rules.load(place / "spec.json", place / "trust.json"), utc_now()
    said = receipt("extra", finished=format_time(now), started=format_time(now))
    write_receipt(done.folder / "receipts", said, ReleaseFolder(done.folder).subjects(), KEY)
    assert done.receipt is not None
    done.receipt.unlink()
    (done.folder / "image.cdx.json").write_text("{}")
    with pytest.raises(CheckFailed) as caught:
        update_release(done.folder, rules, now)
    assert (caught.value.code, (done.folder / "qualification.json").exists()) == ("release.unproven", False)


def test_a_revoked_key_s_release_is_recorded_again_by_another(place: Path) -> None:
    record(request(place, new_key()))
    trust = Rules.load(place / "spec.json", place / "trust.json").policy
    assert not record(replace(request(place), policy=trust)).again
    folder = ReleaseFolder(place / "releases/v1-r1")
    folder.check_files(trust, utc_now())
    folder.require_proven(trust, utc_now())


@pytest.mark.parametrize("name", ["a.cdx.json", "inventory-b.json", "provenance.json", "container.json"])
@pytest.mark.parametrize("change", ["changed", "gone"])
def test_a_file_that_was_rewritten_is_found_out(place: Path, name: str, change: str) -> None:
    record(request(place))
    rules = Rules.load(place / "spec.json", place / "trust.json")
    folder = place / "releases/v1-r1"
    update_release(folder, rules, utc_now())
    if change == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    with pytest.raises(CheckFailed) as caught:
        check_release(folder, rules)
    # Without its container.json a folder has other subjects, which shows first.
    assert caught.value.code == (
        "qualification.differs" if (name, change) == ("container.json", "gone") else "release.rewritten"
    )
    with pytest.raises(CheckFailed):
        update_release(folder, rules, utc_now())


def test_a_recorded_file_is_never_written_again(place: Path) -> None:
    record(request(place))
    changed = place / "releases/v1-r1/a.cdx.json"
    changed.write_bytes(b"{}")
    with pytest.raises(ConflictError) as caught:
        record(request(place))
    assert "a.cdx.json" in caught.value.message and changed.read_bytes() == b"{}"


def test_records_alone_are_completed(place: Path) -> None:
    """As a repack leaves them."""
    folder = ReleaseFolder(place / "releases/v1-r1").create()
    for name in ("portable.json", "container.json"):
        folder.add(name, (place / "dist" / name).read_bytes())
    assert not record(request(place)).again
    assert record(request(place)).again


def test_a_spec_with_a_credential_is_not_kept(tmp_path: Path) -> None:
    """Somebody let the image's label pass; the folder still does not repeat it."""
    link = "https://user:hunter2hunter2@example.org/x"
    make_build(tmp_path, labels={"source": link})
    allowed = {hashlib.sha256(f"source={link}".encode()).hexdigest(): "an example"}
    done = record(replace(request(tmp_path), allow=ScanOptions(allow=allowed)))
    assert "spec.json" not in done.files and "provenance.json" in done.files
    assert not [p for p in done.folder.rglob("*") if p.is_file() and b"hunter2" in p.read_bytes()]


def cli(place: Path, *words: object) -> subprocess.CompletedProcess[str]:
    program = "from oci_builder.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_TOKEN": ""}
    argv = [sys.executable, "-c", program, *(str(word) for word in words)]
    return subprocess.run(argv, cwd=place, env=environment, capture_output=True, text=True, check=False)


def test_from_the_command_line(place: Path) -> None:
    """record, qualification by the folder's own spec, receipt verify of the provenance, sbom, and what is refused."""
    save_key(KEY, place / "k")
    release, trust = "releases/v1-r1", ("--trust", "trust.json")
    made = cli(place, "record", "dist", release, *trust, "--key", "k", "--json")
    assert (made.returncode, json.loads(made.stdout)["state"]) == (0, "candidate")
    (place / "spec.json").rename(place / "moved.json")
    assert "delivered" in cli(place, "qualification", release, *trust).stdout
    proof = cli(place, "receipt", "verify", f"{release}/provenance.json", *trust, "--archive", "dist/runtime.tar.gz")
    assert (proof.returncode, proof.stdout.split(":")[0]) == (0, "verified")
    bill = json.loads(cli(place, "sbom", "dist", "--tier", "b").stdout)
    assert bill == document(place, "b.cdx.json")
    assert cli(place, "sbom", "dist", "--epoch", 10**17).returncode == 2
    send = ("publish", release, "--archives", "dist", *trust, "--key", "k", "--helper")
    for words, status in (
        (("ensure_runtime.sh",), 2), (("ensure_runtime.sh", "--repo", "o/r"), 2), (("none", "--repo", "o/r"), 2),
        (("ensure_runtime.sh", "--to-registry", "127.0.0.1:1/x:t", "--repo", "o/r"), 2),
        (("ensure_runtime.sh", "--to-registry", "UPPER CASE"), 2),
    ):  # fmt: skip
        refused = cli(place, *send, *words)
        assert (refused.returncode, "Traceback" in refused.stderr) == (status, False), refused.stderr
    (place / release / "b.cdx.json").unlink()
    gone = cli(place, "qualification", release, *trust)
    assert (gone.returncode, "release.rewritten" in gone.stderr) == (1, True)
