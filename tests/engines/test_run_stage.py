"""The door into a stage: JSON in and out, versions, options, errors, kept folders, receipts (issue 8, items 4, 6, 7)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from oci_builder import __version__
from oci_builder.engines.run import run_stage, sign_result
from oci_builder.engines.stages import Request, find_stage
from oci_builder.engines.stages_files import checked_copy, kept_build
from oci_builder.engines.stages_first import before
from oci_builder.engines.stages_options import parse_options
from oci_builder.model.errors import ConflictError, IntegrityError, OciBuilderError, SpecError
from oci_builder.model.events import Event, silent
from oci_builder.model.receipts import DOCKER, OCI, PORTABLE
from oci_builder.qualification import Rules, update_release
from oci_builder.receipt import make_key
from oci_builder.release.host import utc_now
from tests.engines.stages_lab import Lab, make_lab

BASE = {"scratch": True}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """On an empty base: nothing runs in it, and it is built in a moment."""
    return make_lab(tmp_path, base=BASE)


@pytest.fixture(scope="module")
def _packed(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    made = make_lab(tmp_path_factory.mktemp("packed"), base=BASE)
    assert go(made, "container")["outcome"] == "pass"
    return made


@pytest.fixture
def packed(_packed: Lab, tmp_path: Path) -> Lab:
    """The lab after ``container``: archives, and a recorded release."""
    # Hard links are part of a tier.
    subprocess.run(["cp", "-a", str(_packed.root), str(tmp_path / "copy")], check=True)
    return Lab(tmp_path / "copy")


def go(lab: Lab, name: str, engine: str = "local", emit: Any = silent, **changes: Any) -> dict[str, Any]:
    result = run_stage(name, lab.request(**changes).to_json(), engine, emit)
    return dict(json.loads(json.dumps(result)))


def code(result: dict[str, Any]) -> str:
    return str(result["error"]["code"]) if result["error"] else ""


def test_another_version_is_refused_before_anything_is_done(lab: Lab) -> None:
    found = go(lab, "package", version="0.0.1")
    assert (code(found), found["exit"], lab.out.exists()) == ("stage.version", 2, False)
    assert go(lab, "build", version=__version__)["outcome"] == "pass"


def test_an_unknown_option_is_refused(lab: Lab) -> None:
    assert code(go(lab, "package", options={"jbos": 1})) == "stage.option"


@pytest.mark.parametrize(
    "value",
    [{}, {"spec": "s", "out": "o"}, {"spec": "s", "out": "o", "cache": "c", "more": 1},
     {"spec": 1, "out": "o", "cache": "c"}, {"spec": "s", "out": "o", "cache": "c", "options": []}],
)  # fmt: skip
def test_a_request_that_is_none(value: dict[str, Any]) -> None:
    assert code(run_stage("build", value, "local")) == "stage.request"


def test_an_unknown_stage(lab: Lab) -> None:
    assert code(go(lab, "deploy")) == "stage.name"


def test_an_unknown_engine_is_a_mistake_of_ours(lab: Lab) -> None:
    with pytest.raises(ValueError):
        run_stage("build", lab.request().to_json(), "docker")


def test_a_missing_spec_is_an_error_in_the_result(lab: Lab) -> None:
    found = go(lab, "build", spec=str(lab.root / "none.json"))
    assert (code(found), found["exit"], found["receipt"]) == ("spec.path", 2, None)


def test_container_finishes_what_package_left_open(lab: Lab) -> None:
    found = go(lab, "container")
    assert (found["outcome"], found["details"]["unchanged"]) == ("pass", False)
    assert go(lab, "container")["details"]["unchanged"] is True


def test_stages_out_of_order_say_which_comes_first(lab: Lab) -> None:
    found = go(lab, "container-check")
    assert (code(found), found["exit"]) == ("stage.order", 2)


@pytest.mark.parametrize("name", [PORTABLE, OCI, DOCKER])
def test_an_archive_that_is_not_its_record_s(packed: Lab, name: str) -> None:
    path = packed.out / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = go(packed, "container-check")
    assert (found["outcome"], found["exit"]) in {("error", 3), ("fail", 1)}
    assert found["receipt"] is None or found["outcome"] == "fail"


def test_a_check_that_says_no_is_signed_and_its_folder_kept(packed: Lab) -> None:
    """An image without a system cannot run: the stage says no, and that is evidence, too."""
    seen: list[Event] = []
    scratch = packed.root / "scratch"
    found = go(packed, "container-check", emit=seen.append, scratch=str(scratch))
    assert (found["outcome"], found["exit"], code(found)) == ("fail", 1, "stage.checks")
    assert Path(found["receipt_path"]).parent == packed.release / "receipts"
    kept = Path(found["kept"])
    assert sorted(p.name for p in kept.iterdir()) == [DOCKER, OCI]
    assert any(e.kind == "warning" and str(kept) in e.message for e in seen)


def test_with_scratch_the_archives_are_copied_once(packed: Lab) -> None:
    seen: list[Event] = []
    found = go(packed, "container", emit=seen.append, scratch=str(packed.root / "scratch"))
    assert found["outcome"] == "pass"
    assert [e.task for e in seen if e.kind == "start" and e.task.startswith("copy")] == [f"copy {OCI}", f"copy {DOCKER}"]
    assert list((packed.root / "scratch/stages").iterdir()) == []


def test_a_copy_of_other_bytes_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "to").mkdir()
    with pytest.raises(IntegrityError):
        checked_copy(tmp_path / "a", "0" * 64, tmp_path / "to", silent)
    assert list((tmp_path / "to").iterdir()) == []


def test_what_an_interrupted_run_left_goes(packed: Lab) -> None:
    left = packed.root / "cache/stages/container-a1"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    assert go(packed, "container", attempt="a1")["outcome"] == "pass"
    assert not left.exists()


def lies(lab: Lab) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (*lab.out.iterdir(), lab.release / "portable.json")}


@pytest.mark.parametrize("name", ["package", "container"])
def test_a_release_of_another_build_keeps_its_archives(packed: Lab, name: str) -> None:
    """The spec's inputs changed after the release was recorded: that is another release, or a repack."""
    (packed.root / "envs/one/lib/pkg/own.py").write_text("VALUE = 'other'\n")
    there = lies(packed)
    assert code(go(packed, name)) == "release.exists"
    assert lies(packed) == there
    assert sorted(p.name for p in packed.root.iterdir() if p.name.startswith(".")) == []


def test_two_runs_do_not_write_into_one_place(packed: Lab) -> None:
    there = lies(packed)
    with kept_build(packed.request()):
        assert code(go(packed, "package")) == "stage.busy"
    assert lies(packed) == there
    assert go(packed, "package")["outcome"] == "pass"


def test_what_a_killed_run_had_kept_is_put_back(packed: Lab) -> None:
    there, kept = lies(packed), packed.root / ".dist.before"
    packed.out.rename(kept)
    packed.out.mkdir()
    (packed.out / OCI).write_bytes(b"half")
    assert go(packed, "package")["outcome"] == "pass"
    assert lies(packed) == there
    assert not kept.exists()


def test_without_a_key_nothing_is_recorded(lab: Lab) -> None:
    found = go(lab, "container", key="")
    assert (found["outcome"], lab.release.exists()) == ("pass", False)
    assert any("takes a key" in note for note in found["notes"])


@pytest.mark.parametrize("name", ["container", "repack"])
def test_a_key_that_nobody_believes_records_nothing(name: str, packed: Lab) -> None:
    """The release would stand there with evidence that no gate counts."""
    make_key(packed.root / "stranger")
    before_, receipts = lies(packed), packed.receipts()
    options = {"trust": str(packed.trust)}
    found = go(packed, name, key=str(packed.root / "stranger"), options=options)
    assert (code(found), found["exit"]) == ("key.trust", 4)
    assert (lies(packed), packed.receipts()) == (before_, receipts)


def test_recorded_without_a_policy_it_says_so(lab: Lab) -> None:
    assert any("trust policy" in note for note in go(lab, "container")["notes"])


def test_a_result_holds_no_secret_of_the_machine_that_ran_it(packed: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's environment need not have it, so the sender could not hide it."""
    monkeypatch.setenv("SOME_TOKEN", "plain-word-77")
    found = go(packed, "container-check", release="", key="", options={"checks": str(packed.root / "plain-word-77")})
    assert found["error"] and "plain-word-77" not in json.dumps(found)


def test_archives_of_two_builds_get_no_receipt(packed: Lab) -> None:
    """Each is what its record says, but the portable archive's layers are not the image's."""
    path = packed.out / "portable.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "diff_ids": value["diff_ids"][:-1]}))
    found = go(packed, "container-check", release="", key="")
    assert (code(found), found["exit"], found["receipt"]) == ("layer.diff_id", 3, None)


def forget_containers(lab: Lab) -> None:
    """No receipt of the stage; that of the record stays, without which nobody judges the folder."""
    for old in lab.receipts():
        if old.name.startswith("container-"):
            old.unlink()


def test_without_a_key_the_sender_signs(packed: Lab) -> None:
    found = go(packed, "container", key="")
    assert found["receipt_path"] == ""
    forget_containers(packed)
    path = sign_result(found, packed.key, packed.release / "receipts")
    assert [p for p in packed.receipts() if p.name.startswith("container-")] == [path]
    assert update(packed)["gates"][0]["state"] == "met"
    with pytest.raises(ConflictError):
        sign_result(found, packed.key, packed.release / "receipts")


@pytest.mark.parametrize(("env", "engine", "said"), [("", "modal", "modal"), ("/rootfs", "modal", "fake"), ("/r", "local", "fake")])
def test_the_stand_in_counts_for_no_gate(
    packed: Lab, monkeypatch: pytest.MonkeyPatch, env: str, engine: str, said: str
) -> None:
    forget_containers(packed)
    monkeypatch.setenv("FAKEPLANE_ROOTFS", env)
    found = go(packed, "container", engine)
    assert (found["engine"], found["receipt"]["predicate"]["engine"]) == (said, said)
    assert update(packed)["gates"][0]["state"] == ("open" if said == "fake" else "met")


def update(lab: Lab) -> dict[str, Any]:
    return update_release(lab.release, Rules.load(lab.root / "spec.json", lab.trust), utc_now())


def test_each_run_has_a_receipt_of_its_own(packed: Lab) -> None:
    attempts = {go(packed, "container", attempt="same")["attempt"] for _ in range(2)}
    assert (len(attempts), len(list(packed.release.glob("receipts/container-2*.json")))) == (2, 3)


def test_no_hard_links_fail_at_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("oci_builder.engines.stages_build.os.link", refuse)
    assert code(go(lab, "build")) == "stage.hardlinks"


@pytest.mark.parametrize("given", ["jobs", "jobs=x", "where=host", "=1"])
def test_options_as_they_are_typed(given: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_options(find_stage("package"), [given])
    assert caught.value.code == "stage.option"


def test_options_have_their_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_options(find_stage("package"), ["jobs=3"]) == {"jobs": 3}
    assert parse_options(find_stage("single"), ["tiers=base, vllm"]) == {"tiers": ["base", "vllm"]}
    assert parse_options(find_stage("container-check"), ["checks=c.json"]) == {"checks": str(tmp_path / "c.json")}
    with pytest.raises(SpecError):
        parse_options(find_stage("package"), ["jobs=1", "jobs=2"])


def test_the_sender_looks_first(lab: Lab) -> None:
    with pytest.raises(OciBuilderError) as caught:
        before(find_stage("nccl8-u24"), lab.request(options={"trust": str(lab.trust)}))
    assert (caught.value.code, caught.value.exit_status) == ("release.folder", 2)
    before(find_stage("nccl8"), lab.request())


def test_a_request_goes_there_and_back(lab: Lab) -> None:
    request = lab.request(options={"jobs": 2}, attempt="x")
    assert Request.parse(json.loads(json.dumps(request.to_json()))) == request
