"""The gates of verify --exec, on trees made of this machine's own programs."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from chroot_exec.protocol import Check
from oci_builder.execution import gates
from oci_builder.execution.companions import Portable, portable_beside
from oci_builder.execution.gates import ARCHIVE, ASSEMBLY, EXEC, GateContext, verify_exec
from oci_builder.execution.run import ExecOptions
from oci_builder.execution.staging import Staged
from oci_builder.model.errors import FormatError
from oci_builder.model.report import Finding, Report
from tests.execution.lab import GOOD, SUBJECTS, judge, outcomes, shell


def test_three_gates_pass(root: Path, options: ExecOptions) -> None:
    statement = judge(GOOD, root, [shell("a", "true"), shell("b", "echo x")], options)
    assert outcomes(statement) == {ARCHIVE: "pass", ASSEMBLY: "pass", EXEC: "pass", "a": "pass", "b": "pass"}
    assert statement.digests == {"runtime.oci.tar": "11" * 32, "runtime.docker.tar.gz": "22" * 32}
    assert statement.predicate.host.os == "debian 12"
    assert statement.predicate.host.kernel == os.uname().release
    assert statement.predicate.details["config"] == "sha256:" + "44" * 32


def test_a_check_that_fails_fails_only_its_gate(root: Path, options: ExecOptions) -> None:
    statement = judge(GOOD, root, [shell("good", "true"), shell("bad", "exit 3")], options)
    assert outcomes(statement) == {ARCHIVE: "pass", ASSEMBLY: "pass", EXEC: "fail", "good": "pass", "bad": "fail"}


@pytest.mark.parametrize(
    ("codes", "archive", "assembly"),
    [(("blob.digest",), "fail", "skipped"), (("archive.twin",), "pass", "fail"), (("spec.path",), "fail", "skipped"),
     (("tar.truncated", "config.rootfs"), "fail", "fail"), (("spec.digest",), "pass", "fail")],
)  # fmt: skip
def test_nothing_runs_from_an_archive_that_is_not_good(
    options: ExecOptions, codes: tuple[str, ...], archive: str, assembly: str
) -> None:
    """Nor is it said of bytes that cannot be read that they make a whole image."""
    def never() -> Staged:
        raise AssertionError("staged all the same")

    report = Report(SUBJECTS, tuple(Finding(code, "error", "somewhere") for code in codes))
    statement = verify_exec(report, never, lambda _: [], options)
    assert outcomes(statement) == {ARCHIVE: archive, ASSEMBLY: assembly, EXEC: "skipped"}


def test_staging_that_fails_is_an_error_of_the_third_gate(options: ExecOptions) -> None:
    def broken() -> Staged:
        raise FormatError("tar.checksum", "bad")

    statement = verify_exec(GOOD, broken, lambda _: [], options)
    assert outcomes(statement)[EXEC] == "error"
    assert "tar.checksum" in statement.predicate.checks[2].reason


def later(name: str) -> Check:
    """A check that puts its question off."""
    script = """echo '{"outcome": "deferred", "reason": "no driver"}'"""
    return shell(name, script, result="json", deferrable=True)


def test_without_gpus_deferrals_do_not_fail_the_gate_and_are_listed(root: Path, options: ExecOptions) -> None:
    statement = judge(GOOD, root, [shell("now", "true"), later("later")], options)
    assert outcomes(statement) == {ARCHIVE: "pass", ASSEMBLY: "pass", EXEC: "pass", "now": "pass", "later": "deferred"}
    check = statement.predicate.check(EXEC)
    assert check
    assert check.details == {"deferred": ["later"]}


def test_nothing_but_deferrals_proves_nothing(root: Path, options: ExecOptions) -> None:
    statement = judge(GOOD, root, [later("later")], options)
    assert outcomes(statement)["later"] == "deferred"
    assert outcomes(statement)[EXEC] == "deferred"


def test_a_failure_beside_a_deferral_fails(root: Path, options: ExecOptions) -> None:
    statement = judge(GOOD, root, [shell("now", "true"), later("later"), shell("bad", "false")], options)
    assert outcomes(statement)[EXEC] == "fail"


@pytest.mark.parametrize(("gpus", "outcome"), [(False, "pass"), (True, "deferred")])
def test_with_gpus_a_deferral_is_no_pass(gpus: bool, outcome: str) -> None:
    """Requirements section 7: the GPU stage must clear every deferral, so it can have none of its own."""
    checks = [{"name": "now", "outcome": "pass"}, {"name": "later", "outcome": "deferred"}]
    receipt = {"outcome": "deferred", "error": None, "checks": checks}
    assert gates._overall(receipt, gpus).outcome == outcome


def test_the_portable_archive_is_a_subject_too(options: ExecOptions) -> None:
    context = GateContext(portable=Portable("55" * 32))
    report = Report(SUBJECTS, (Finding("blob.digest", "error", "somewhere"),))
    statement = verify_exec(report, lambda: None, lambda _: [], options, context)  # type: ignore[arg-type, return-value]
    assert statement.digests["runtime.tar.gz"] == "55" * 32


class Beside:
    """A portable archive with its record, of the image whose layers are a, b, c."""

    def __init__(self, folder: Path) -> None:
        self.archive, self.cache = folder / "runtime.oci.tar", folder / "cache"
        self.portable = folder / "runtime.tar.gz"
        self.portable.write_bytes(b"portable")
        self.sha256 = hashlib.sha256(b"portable").hexdigest()
        self.record(["b", "c"], self.sha256)

    def record(self, diff_ids: object, sha256: str) -> None:
        text = json.dumps({"sha256": sha256, "diff_ids": diff_ids})
        (self.archive.parent / "portable.json").write_text(text)

    def found(self) -> Portable:
        return portable_beside(self.archive, ["a", "b", "c"], self.cache)


def test_a_portable_archive_of_the_same_build_is_named(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    assert beside.found() == Portable(beside.sha256)


@pytest.mark.parametrize("diff_ids", [["b"], ["x", "c"], [], None, "bc", ["0", "a", "b", "c"]])
def test_a_portable_archive_of_another_build_is_not_named(diff_ids: object, tmp_path: Path) -> None:
    """A receipt must not say more than was tested."""
    beside = Beside(tmp_path)
    beside.record(diff_ids, beside.sha256)
    assert (beside.found().sha256, bool(beside.found().reason)) == ("", True)


def test_a_portable_archive_with_other_bytes_is_not_named(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.portable.write_bytes(b"Portable")
    assert "not those of portable.json" in beside.found().reason


def test_no_portable_archive_is_nothing_to_speak_of(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.portable.unlink()
    assert beside.found() == Portable()


def test_output_digests_are_in_the_receipt(root: Path, options: ExecOptions) -> None:
    statement = judge(GOOD, root, [shell("a", "echo x")], options)
    check = statement.predicate.check("a")
    assert check
    assert check.details["stdout"]["sha256"] == hashlib.sha256(b"x\n").hexdigest()


def test_a_receipt_holds_no_token_that_a_check_was_given_or_says(root: Path, options: ExecOptions) -> None:
    """Issue of tokens in receipts: in a check's words, in its result, and in what it says when it fails."""
    token = "hf_" + "A1b2C3d4E5" * 3
    told = json.dumps({"outcome": "fail", "reason": f"no answer for {token}", "details": {"asked": [token]}})
    checks = [shell("one", f"echo '{told}' # {token}", result="json")]
    text = judge(GOOD, root, checks, options).model_dump_json()
    assert token not in text
    assert "no answer for ***" in text
