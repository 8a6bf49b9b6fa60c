"""The exec verb, on trees made of this machine's own programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from chroot_exec.protocol import Bind
from oci_builder.execution import gates
from oci_builder.execution.gates import ARCHIVE, ASSEMBLY, EXEC
from oci_builder.execution.run import ExecOptions, gpu_selection, image_checks, load_checks, run_checks, run_in
from oci_builder.model.errors import CheckFailed, SpecError, TransportError
from tests.chroot.lab import any_word, processes_with, until
from tests.execution.lab import GOOD, judge, outcomes, shell


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


def test_another_runner_among_the_installed_packages_is_not_ours(root: Path, tmp_path: Path) -> None:
    """A second version, or a checkout beside it: the one that checks a request is the one that runs it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (other,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (other / "chroot_exec").mkdir()
    (other / "chroot_exec/__init__.py").write_text("raise SystemExit(99)\n")
    code = "import sys; from pathlib import Path; from oci_builder.execution.run import *\n"
    code += f"sys.exit(run_in(Path({str(root)!r}), {{}}, ['/bin/sh', '-c', 'exit 5'], ExecOptions()).status)"
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 5, done.stderr


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
        assert process.wait(timeout=300) == 8


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_an_interruption_is_no_verdict(root: Path, options: ExecOptions, number: int, status: int) -> None:
    """The operator's signal ends everything as if no check had run: no receipt, and the status is the signal's."""
    word = any_word()
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
        until(lambda: processes_with(word))
        process.send_signal(number)
        assert process.communicate(timeout=300)[0] == b""
        assert process.returncode == status
    # The kernel ends a namespace's processes a moment after its first one.
    until(lambda: not processes_with(word))
    assert list(Path(options.state).glob("run-*")) == []


def test_the_caller_killed_takes_the_program_along(root: Path, options: ExecOptions) -> None:
    """No process and no mount is left, and the next run tidies up the record."""
    word = any_word()
    code = (
        "from pathlib import Path; from oci_builder.execution.run import *;"
        f"run_in(Path({str(root)!r}), {{}}, ['sleep', '{word}'], ExecOptions(state={options.state!r}))"
    )
    with started(code) as process:
        until(lambda: processes_with(word))
        process.kill()
    until(lambda: not processes_with(word))
    assert run_in(root, {}, ["true"], options).status == 0
    assert list(Path(options.state).glob("run-*")) == []


def test_nothing_is_written_for_a_request(
    root: Path, options: ExecOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request holds variables, and those can be secrets."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    receipt = run_checks(root, {}, [shell("open", "ls /proc/self/fd; cat /proc/1/fd/* 2>&1; true")], options)
    stdout = receipt["checks"][0]["stdout"]["text"]
    assert stdout.split()[:4] == ["0", "1", "2", "3"] and "schema" not in stdout
    assert os.listdir(tmp_path / "temporary") == []


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python of its own, which ends with the test however that ends: what it runs would wait for hours."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


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
