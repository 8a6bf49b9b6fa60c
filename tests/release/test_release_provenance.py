"""Provenance, the receipt verb, and the host as receipts name it."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import OciBuilderError, SpecError
from oci_builder.model.jsontext import dump_json
from oci_builder.model.receipts import PORTABLE
from oci_builder.model.spec import Spec, parse_spec
from oci_builder.receipt import archive_digests, make_key, show_receipt, sign_receipt, verify_receipt
from oci_builder.release.host import driver_version, engine_name, os_name, this_host, tool_versions, utc_now
from oci_builder.release.provenance import (
    BuildRun,
    Material,
    base_material,
    is_provenance,
    judge_provenance,
    provenance,
)
from oci_builder.release.receipts import Answer, Verdict, judge, make_statement
from oci_builder.release.signing import SigningKey, load_key, load_public, new_key
from tests.release.helpers import NOW, SUBJECTS, policy, receipt, trusted

DIGEST = "sha256:" + "1" * 64
RUN = BuildRun("run-1", "2026-05-01T10:00:00Z", "2026-05-01T10:05:00Z", {"oci-builder": "0.1.0"})


def spec() -> Spec:
    value = {
        "name": "x", "tag": "t", "prefix": "/opt/rt", "tiers": {"base": {"path": "/e"}},
        "base": {"registry": "docker.io/nvidia/cuda:13", "digest": DIGEST}, "labels": {"u": "https://a:s3cret@h/x"},
    }  # fmt: skip
    return parse_spec(json.dumps(value).encode())


def test_provenance_names_inputs_outputs_and_builder() -> None:
    base = base_material(spec())
    assert base is not None
    source = Material("git+https://github.com/o/r", {"gitCommit": "8" * 40}, "source")
    value = json.loads(provenance(spec(), SUBJECTS, [source, base], RUN))
    assert {s["name"]: s["digest"]["sha256"] for s in value["subject"]} == SUBJECTS
    deps = value["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert [d["digest"] for d in deps] == [{"gitCommit": "8" * 40}, {"sha256": "1" * 64}]
    assert value["predicate"]["runDetails"]["builder"]["version"] == {"oci-builder": "0.1.0"}
    assert value["predicateType"] == "https://slsa.dev/provenance/v1"


def test_provenance_does_not_depend_on_the_order() -> None:
    materials = [Material(f"u{i}", {"sha256": str(i) * 64}) for i in range(4)]
    assert provenance(spec(), SUBJECTS, materials, RUN) == provenance(spec(), SUBJECTS, materials[::-1], RUN)


def test_provenance_holds_no_secret() -> None:
    link = Material("https://u:s3cret@h/lock?X-Amz-Signature=s3cret", {"sha256": "2" * 64})
    assert b"s3cret" not in provenance(spec(), SUBJECTS, [link], RUN)


@pytest.mark.parametrize(("subjects", "digest"), [({}, {"sha256": "1" * 64}), (SUBJECTS, {})])
def test_provenance_of_nothing_or_from_nothing_is_refused(subjects: dict[str, str], digest: dict[str, str]) -> None:
    with pytest.raises(SpecError) as caught:
        provenance(spec(), subjects, [Material("u", digest)], RUN)
    assert caught.value.code == "provenance.material"


class TestJudging:
    """A provenance is judged like a receipt: by its stored bytes, its key, its time, and what it is about."""

    KEY = new_key()

    def verdict(self, key: SigningKey | None = None, **changes: Any) -> Verdict:
        value = json.loads(provenance(spec(), SUBJECTS, [Material("u", {"sha256": "1" * 64})], RUN))
        for name, change in changes.items():
            value[name] = change(value[name])
        signed = (key or self.KEY).sign(dump_json(value))
        return judge_provenance(signed, policy(trusted(self.KEY)), now=NOW, subjects=SUBJECTS)

    def test_a_good_one_is_verified(self) -> None:
        found = self.verdict()
        assert (found.answer, found.to_json()["subjects"]) == (Answer.VERIFIED, SUBJECTS)

    def test_every_changed_byte_of_the_payload_fails(self) -> None:
        value = json.loads(self.KEY.sign(provenance(spec(), SUBJECTS, [Material("u", {"sha256": "1" * 64})], RUN)))
        payload = base64.b64decode(value["payload"])
        for at in range(0, len(payload), 37):
            changed = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
            data = dump_json({**value, "payload": base64.b64encode(changed).decode()})
            found = judge_provenance(data, policy(trusted(self.KEY)), now=NOW, subjects=SUBJECTS)
            assert found.answer is Answer.FAILED

    def test_a_stranger_s_cannot_be_told(self) -> None:
        assert self.verdict(new_key()).answer is Answer.CANNOT_TELL

    def test_of_another_archive_it_fails(self) -> None:
        other = [{"name": PORTABLE, "digest": {"sha256": "9" * 64}}]
        found = self.verdict(subject=lambda _: other)
        assert (found.answer, found.code) == (Answer.FAILED, "receipt.subject")

    def test_of_none_of_these_archives_it_cannot_be_told(self) -> None:
        other = [{"name": "x", "digest": {"sha256": "9" * 64}}]
        assert self.verdict(subject=lambda _: other).answer is Answer.CANNOT_TELL

    @pytest.mark.parametrize(
        "subject",
        [[], "x", [{"name": "x"}], [{"name": "x", "digest": {"sha256": "zz"}}],
         [{"name": PORTABLE, "digest": {"sha256": "9" * 64}}, {"name": PORTABLE, "digest": {"sha256": "a" * 64}}]],
    )  # fmt: skip
    def test_odd_subjects_are_never_verified(self, subject: Any) -> None:
        assert self.verdict(subject=lambda _: subject).answer is not Answer.VERIFIED

    @pytest.mark.parametrize("finished", ["2027-05-01T10:05:00Z", "2020-01-01T00:00:00Z", "yesterday", None, 5])
    def test_times_out_of_the_key_s_bounds_and_none_at_all(self, finished: Any) -> None:
        def change(predicate: dict[str, Any]) -> dict[str, Any]:
            predicate["runDetails"]["metadata"]["finishedOn"] = finished
            return predicate

        assert self.verdict(predicate=change).answer is not Answer.VERIFIED

    def test_a_key_for_other_stages_does_not_count(self) -> None:
        signed = self.KEY.sign(provenance(spec(), SUBJECTS, [Material("u", {"sha256": "1" * 64})], RUN))
        found = judge_provenance(signed, policy(trusted(self.KEY, stages=("single",))), now=NOW, subjects=SUBJECTS)
        assert (found.answer, found.code) == (Answer.FAILED, "receipt.key")

    def test_a_provenance_is_no_receipt_and_a_receipt_no_provenance(self) -> None:
        trust = policy(trusted(self.KEY))
        signed = self.KEY.sign(provenance(spec(), SUBJECTS, [Material("u", {"sha256": "1" * 64})], RUN))
        assert judge(signed, trust, now=NOW, subjects=SUBJECTS).answer is Answer.CANNOT_TELL
        other = self.KEY.sign(make_statement(receipt(), SUBJECTS))
        assert judge_provenance(other, trust, now=NOW, subjects=SUBJECTS).answer is Answer.CANNOT_TELL
        assert (is_provenance(signed), is_provenance(other), is_provenance(b"{")) == (True, False, False)


class TestVerb:
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        key = make_key(tmp_path / "key")
        entry = {
            "name": "me", "public": key["public"], "not_before": "2026-01-01T00:00:00Z",
            "not_after": "2026-12-31T00:00:00Z",
        }  # fmt: skip
        (tmp_path / "trust.json").write_text(json.dumps({"keys": [entry]}))
        (tmp_path / PORTABLE).write_bytes(b"archive")
        (tmp_path / "said.json").write_text(receipt().model_dump_json())
        (tmp_path / "out").mkdir()
        return tmp_path

    def test_sign_then_verify(self, place: Path) -> None:
        subjects = archive_digests([place / PORTABLE])
        path = sign_receipt(place / "said.json", place / "out", subjects, place / "key")
        verdict = verify_receipt(path, place / "trust.json", NOW, subjects)
        assert (verdict.answer.value, show_receipt(verdict)["receipt"]["stage"]) == ("verified", "container")
        (place / PORTABLE).write_bytes(b"archivf")
        changed = verify_receipt(path, place / "trust.json", NOW, archive_digests([place / PORTABLE]))
        assert (changed.answer.value, changed.answer.exit_status) == ("failed", 3)

    @pytest.mark.parametrize("kind", ["receipt", "provenance"])
    def test_every_archive_that_is_asked_about_must_be_named(self, place: Path, kind: str) -> None:
        """Else any file whatsoever would pass beside one that is named."""
        subjects = archive_digests([place / PORTABLE])
        path = sign_receipt(place / "said.json", place / "out", subjects, place / "key")
        if kind == "provenance":
            run = BuildRun("run-1", "2026-05-01T10:00:00Z", "2026-05-01T10:05:00Z", {})
            path.write_bytes(load_key(place / "key").sign(provenance(spec(), subjects, [], run)))
        (place / "other.tar").write_bytes(b"anything")
        asked = archive_digests([place / PORTABLE, place / "other.tar"])
        verdict = verify_receipt(path, place / "trust.json", NOW, asked)
        assert (verdict.answer, verdict.answer.exit_status) == (Answer.CANNOT_TELL, 1)
        assert (verdict.code, verdict.reasons) == ("receipt.subject", ("it does not name 'other.tar'",))

    @pytest.mark.parametrize("which", ["receipt", "trust", "archive", "source", "public key"])
    def test_a_pipe_is_refused_and_not_waited_for(self, place: Path, which: str) -> None:
        """B124: the program would sit there for ever."""
        pipe, now = place / "pipe", utc_now()
        os.mkfifo(pipe)
        with pytest.raises(SpecError) as caught:
            if which == "receipt":
                verify_receipt(pipe, place / "trust.json", now)
            elif which == "trust":
                verify_receipt(place / "said.json", pipe, now)
            elif which == "archive":
                archive_digests([pipe])
            elif which == "source":
                sign_receipt(pipe, place / "out", SUBJECTS, place / "key")
            else:
                load_public(pipe)
        assert caught.value.code == "spec.path"

    def test_a_provenance_is_verified_by_the_same_verb(self, place: Path) -> None:
        run = BuildRun("run-1", "2026-05-01T10:00:00Z", "2026-05-01T10:05:00Z", {})
        made = load_key(place / "key").sign(provenance(spec(), SUBJECTS, [], run))
        (place / "provenance.json").write_bytes(made)
        verdict = verify_receipt(place / "provenance.json", place / "trust.json", NOW, SUBJECTS)
        assert verdict.answer is Answer.VERIFIED

    def test_what_is_no_receipt_is_not_signed(self, place: Path) -> None:
        (place / "said.json").write_text('{"stage": "x"}')
        with pytest.raises(OciBuilderError) as caught:
            sign_receipt(place / "said.json", place / "out", SUBJECTS, place / "key")
        assert (caught.value.code, list((place / "out").iterdir())) == ("json.field", [])

    def test_two_archives_of_one_name_are_refused(self, place: Path) -> None:
        (place / "out" / PORTABLE).write_bytes(b"x")
        with pytest.raises(SpecError):
            archive_digests([place / PORTABLE, place / "out" / PORTABLE])


class TestHost:
    def test_the_system_and_the_driver_are_read_from_the_root(self, tmp_path: Path) -> None:
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc/os-release").write_text('NAME="Ubuntu"\nID=ubuntu\nVERSION_ID="22.04"\nID_LIKE=debian\n')
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\nGCC version: 13.2\n"
        )
        host = this_host(tmp_path)
        assert (host.os, host.driver, host.gpus) == ("ubuntu 22.04", "580.95.05", ())

    def test_an_empty_root_says_nothing(self, tmp_path: Path) -> None:
        assert (os_name(tmp_path), driver_version(tmp_path)) == ("", "")

    @pytest.mark.parametrize(
        ("env", "engine"),
        [
            ({}, "local"),
            ({"MODAL_TASK_ID": "ta-1"}, "modal"),
            ({"MODAL_TASK_ID": "ta-1", "FAKEPLANE_ROOTFS": "/x"}, "fake"),
        ],
    )
    def test_the_stand_in_is_never_taken_for_modal(self, env: dict[str, str], engine: str) -> None:
        assert engine_name(env) == engine

    def test_absent_tools_are_left_out(self) -> None:
        assert "no-such-package" not in tool_versions("no-such-package", "pydantic")
