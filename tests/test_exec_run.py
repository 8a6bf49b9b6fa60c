"""The exec verb and the gates of verify --exec, on trees made of this machine's own programs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chroot_exec.protocol import Bind, Check
from oci_builder.execution import gates
from oci_builder.execution.companions import Portable, portable_beside
from oci_builder.execution.gates import ARCHIVE, ASSEMBLY, EXEC, GateContext, verify_exec
from oci_builder.execution.run import ExecOptions, gpu_selection, image_checks, load_checks, run_checks, run_in
from oci_builder.execution.staging import Staged
from oci_builder.model.errors import CheckFailed, FormatError, SpecError, TransportError
from oci_builder.model.receipts import Statement
from oci_builder.model.report import Finding, Report
from tests.chroot.lab import processes_with, tiny_root

SUBJECTS = (
    {"kind": "oci-archive", "sha256": "11" * 32, "path": "runtime.oci.tar"},
    {"kind": "docker-archive", "sha256": "22" * 32, "path": "runtime.docker.tar.gz"},
)
GOOD = Report(SUBJECTS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if subprocess.run(["unshare", "-mpf", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    path = tiny_root(tmp_path_factory.mktemp("exec") / "root")
    (path / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\n')
    (path / "opt/rt").mkdir(parents=True)
    (path / "opt/rt/checks.json").write_text(json.dumps({"checks": [{"name": "own", "argv": ["echo", "hello"]}]}))
    return path


@pytest.fixture
def options(tmp_path: Path) -> ExecOptions:
    (tmp_path / "state").mkdir(mode=0o700)
    return ExecOptions(state=str(tmp_path / "state"))


def shell(name: str, script: str, **more: Any) -> Check:
    return Check(name, ("/bin/sh", "-c", script), **more)


def judge(
    report: Report, root: Path, checks: Sequence[Check], options: ExecOptions, config: dict[str, Any] | None = None
) -> Statement:
    staged = Staged(root, config or {}, "11" * 32, "sha256:" + "33" * 32, "sha256:" + "44" * 32)
    return verify_exec(report, lambda: staged, lambda _: checks, options, GateContext(release="r1"))


def outcomes(statement: Statement) -> dict[str, str]:
    return {c.name: c.outcome for c in statement.predicate.checks}


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 137)])
def test_exec_passes_the_status_on(root: Path, options: ExecOptions, script: str, status: int) -> None:
    assert run_in(root, {}, ["/bin/sh", "-c", script], options).status == status


def test_exec_honours_the_image_config(root: Path, options: ExecOptions, capfd: pytest.CaptureFixture[str]) -> None:
    config = {"Env": ["GREETING=hello"], "Entrypoint": ["/bin/sh", "-c"], "Cmd": ["echo $GREETING from $PWD"],
              "WorkingDir": "/var/tmp"}  # fmt: skip
    assert run_in(root, config, [], options).status == 0
    assert capfd.readouterr().out == "hello from /var/tmp\n"


def test_a_runner_that_fails_is_an_error_of_ours(root: Path, options: ExecOptions) -> None:
    with pytest.raises(SpecError) as caught:
        run_in(root, {"User": "nobody-here"}, ["true"], options)
    assert caught.value.code == "user.unknown"


def test_root_that_is_not_to_be_had_is_an_outcome(root: Path, options: ExecOptions) -> None:
    """The runner's receipt then has no sandbox at all."""
    code = (
        "from pathlib import Path; from chroot_exec.protocol import Check; from oci_builder.execution.gates import *;"
        f"staged = Staged(Path({str(root)!r}), {{}}); options = ExecOptions(state={options.state!r}, isolation='root');"
        "results, _, _ = execute(lambda: staged, lambda _: [Check('a', ('true',))], options, this_host());"
        "print(results[0].outcome, results[0].reason)"
    )
    command = ["setpriv", "--bounding-set", "-sys_admin", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.startswith("error [sandbox.privilege]"), done.stderr


def test_a_root_that_is_not_there(tmp_path: Path, options: ExecOptions) -> None:
    with pytest.raises(TransportError):
        run_in(tmp_path / "none", {}, ["true"], options)


def test_no_gpu_where_one_was_asked_for(root: Path, tmp_path: Path, options: ExecOptions) -> None:
    """B203."""
    gpu, _ = gpu_selection("all", {})
    with pytest.raises(CheckFailed) as caught:
        run_in(root, {}, ["true"], replace(options, gpu=replace(gpu, host=str(tmp_path))))
    assert caught.value.code == "gpu.none"


def test_gpu_selection_follows_the_caller() -> None:
    site = {"NCCL_NVLS_ENABLE": "0", "OTHER": "1"}
    assert gpu_selection("", {"CUDA_VISIBLE_DEVICES": "1, GPU-x", **site})[0].devices == ("1", "GPU-x")
    assert gpu_selection("0", {"CUDA_VISIBLE_DEVICES": "1"})[0].devices == ("0",)
    assert gpu_selection("", site) == (gpu_selection("all", {})[0], {"NCCL_NVLS_ENABLE": "0"})
    assert gpu_selection("", {"CUDA_VISIBLE_DEVICES": ""})[0].devices == ("",)


def test_signals_reach_the_program(root: Path, options: ExecOptions) -> None:
    code = (
        "import sys; from pathlib import Path; from oci_builder.execution.run import *;"
        f"o = ExecOptions(state={options.state!r});"
        "s = 'trap \"echo caught; exit 8\" TERM; echo ready; while :; do sleep 0.05; done';"
        f"sys.exit(run_in(Path({str(root)!r}), {{}}, ['/bin/sh', '-c', s], o).status)"
    )
    with started(code) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.stdout.readline() == b"caught\n"
        assert process.wait(timeout=20) == 8


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_an_interruption_is_no_verdict(root: Path, options: ExecOptions, number: int, status: int) -> None:
    """The operator's signal ends everything as if no check had run: no receipt, and the status is the signal's."""
    word = str(40000 + os.getpid() % 9999)
    code = (
        "import sys; from pathlib import Path; from chroot_exec.protocol import Check\n"
        "from oci_builder.execution.gates import verify_exec; from oci_builder.execution.run import *\n"
        "from oci_builder.execution.staging import Staged; from oci_builder.model.report import Report\n"
        f"checks = [Check('held', ('sleep', '{word}')), Check('next', ('sleep', '{word}'))]\n"
        f"staged = Staged(Path({str(root)!r}), {{}}, '11' * 32, '', '')\n"
        "report = Report(({'kind': 'oci-archive', 'sha256': '11' * 32, 'path': 'x'},))\n"
        f"try: print(verify_exec(report, lambda: staged, lambda _: checks, ExecOptions(state={options.state!r})))\n"
        "except KeyboardInterrupt: sys.exit(130)\n"
    )
    with started(code) as process:
        wait_until(lambda: bool(processes_with(word)))
        process.send_signal(number)
        assert process.communicate(timeout=20)[0] == b""
        assert process.returncode == status
    assert not processes_with(word)
    assert list(Path(options.state).glob("run-*")) == []


def test_the_caller_killed_takes_the_program_along(root: Path, options: ExecOptions) -> None:
    """No process and no mount is left, and the next run tidies up the record."""
    word = str(50000 + os.getpid() % 9999)
    code = (
        "from pathlib import Path; from oci_builder.execution.run import *;"
        f"run_in(Path({str(root)!r}), {{}}, ['sleep', '{word}'], ExecOptions(state={options.state!r}))"
    )
    with started(code) as process:
        wait_until(lambda: bool(processes_with(word)))
        process.kill()
    wait_until(lambda: not processes_with(word))
    assert run_in(root, {}, ["true"], options).status == 0
    assert list(Path(options.state).glob("run-*")) == []


def test_nothing_is_written_for_a_request(root: Path, options: ExecOptions) -> None:
    """A request holds variables, and those can be secrets."""
    before = set(os.listdir(tempfile.gettempdir()))
    receipt = run_checks(root, {}, [shell("open", "ls /proc/self/fd; cat /proc/1/fd/* 2>&1; true")], options)
    stdout = receipt["checks"][0]["stdout"]["text"]
    assert stdout.split()[:4] == ["0", "1", "2", "3"] and "schema" not in stdout
    left = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in left if name.startswith("oci-builder-exec")]


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python of its own, which ends with the test however that ends: what it runs would wait for hours."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_checks_of_the_image(root: Path, options: ExecOptions) -> None:
    receipt = run_checks(root, {}, image_checks(root, "/opt/rt"), options)
    assert (receipt["outcome"], receipt["checks"][0]["stdout"]["text"]) == ("pass", "hello\n")


def test_checks_of_the_image_are_read_inside_it(root: Path, tmp_path: Path) -> None:
    (tmp_path / "checks.json").write_text("[]")
    (root / "opt/out").symlink_to(tmp_path)
    with pytest.raises(SpecError) as caught:
        image_checks(root, "/opt/out")
    assert caught.value.code == "spec.checks"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '[{"name": "a"}]', '{"checks": [], "more": 1}', '[{"name":"a","name":"b"}]']
)
def test_wrong_checks(text: str, tmp_path: Path) -> None:
    (tmp_path / "checks.json").write_text(text)
    with pytest.raises(SpecError) as caught:
        load_checks(tmp_path / "checks.json")
    assert caught.value.code == "spec.checks"


@pytest.mark.parametrize("name", [ARCHIVE, ASSEMBLY, EXEC])
def test_a_check_named_as_a_gate_is_refused_before_anything_runs(
    name: str, root: Path, options: ExecOptions, tmp_path: Path
) -> None:
    (tmp_path / "checks.json").write_text(json.dumps([{"name": name, "argv": ["true"]}]))
    with pytest.raises(SpecError) as caught:
        load_checks(tmp_path / "checks.json")
    assert (caught.value.code, name in caught.value.message) == ("spec.checks", True)
    statement = judge(GOOD, root, [shell("other", "true"), shell(name, "true")], options)
    assert outcomes(statement) == {ARCHIVE: "pass", ASSEMBLY: "pass", EXEC: "error"}


def test_a_pipe_of_checks_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """B124."""
    os.mkfifo(tmp_path / "checks.json")
    with pytest.raises(SpecError) as caught:
        load_checks(tmp_path / "checks.json")
    assert caught.value.code == "spec.path"


def test_checks_that_no_receipt_could_hold_are_refused(tmp_path: Path) -> None:
    many = [{"name": f"c{i}", "argv": ["true"]} for i in range(1001)]
    for checks in (many, [{"name": "a", "argv": ["echo", "\udc80"]}]):
        (tmp_path / "checks.json").write_text(json.dumps(checks))
        with pytest.raises(SpecError) as caught:
            load_checks(tmp_path / "checks.json")
        assert caught.value.code == "spec.checks"


def test_a_bad_result_fails_its_check_alone_and_names_it(root: Path, options: ExecOptions) -> None:
    bad = {
        "case": '{"outcome": "pass", "a": 1, "A": 2}',
        "twice": '{"outcome": "fail", "outcome": "pass", "reason": "r"}',
        "number": '{"outcome": "pass", "x": 1e999}',
        "half": '{"outcome": "pass", "x": "\\ud800"}',
        "deep": '{"outcome": "pass", "x": ' + "[" * 70 + "]" * 70 + "}",
    }
    checks = [shell(name, f"echo '{text}'", result="json") for name, text in bad.items()]
    statement = judge(GOOD, root, [shell("good", "true"), *checks], options)
    found = outcomes(statement)
    assert {name: found[name] for name in bad} == dict.fromkeys(bad, "fail")
    assert (found["good"], found[EXEC]) == ("pass", "fail")
    for name in bad:
        check = statement.predicate.check(name)
        assert check
        assert check.reason.startswith("[check.result]")


def test_results_that_are_large_together_keep_every_outcome() -> None:
    """Else a receipt is too large a document, and says nothing at all."""
    rows = [gates.Result(name=f"c{i}", outcome="pass", details={"x": "x" * 60_000}) for i in range(80)]
    bounded = gates._bounded(rows)
    assert [r.outcome for r in bounded] == ["pass"] * 80
    assert bounded[0] == rows[0]
    assert bounded[-1].details == {"left_out": len(rows[-1].model_dump_json())}
    assert sum(len(r.model_dump_json()) for r in bounded) < 3 << 20


def test_words_that_are_no_utf_8_reach_the_program(
    root: Path, options: ExecOptions, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run_in(root, {}, ["echo", os.fsdecode(b"a\xffb")], options).status == 0
    assert capfdbinary.readouterr().out == b"a\xffb\n"


@pytest.mark.parametrize("target", ["relative", "/proc", "/"])
def test_a_request_that_is_wrong_is_refused_once(
    target: str, root: Path, options: ExecOptions, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        run_in(root, {}, ["true"], replace(options, binds=(Bind("/etc", target),)))
    assert (caught.value.code, capfd.readouterr().err) == ("request.field", "")


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [
        (("--bind", "/etc:relative"), 2, b"request.field"),
        (("--bind", "/etc:/proc"), 2, b"request.field"),
        (("--bind", "/etc:/dev"), 2, b"request.field"),
        (("-w", "relative"), 2, b"request.field"),
        (("--user", "nobody-here"), 125, b"user.unknown"),
    ],
)
def test_exec_says_once_what_is_wrong(
    root: Path, tmp_path: Path, words: tuple[str, ...], status: int, code: bytes
) -> None:
    start = (sys.executable, "-c", "import sys; from oci_builder.cli import main; sys.exit(main())", "exec")
    done = subprocess.run([*start, "--cache", tmp_path, *words, root, "--", "true"], capture_output=True)
    assert (done.returncode, done.stderr.count(b"\n"), done.stdout) == (status, 1, b"")
    assert done.stderr.startswith(b"error[" + code + b"]: ")


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
