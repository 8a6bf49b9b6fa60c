"""The command line as programs and people meet it: exit statuses, JSON, silence, completion, and no traceback ever."""

from __future__ import annotations

import io
import json
import os
import pty
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from oci_builder.cli import cli
from oci_builder.cli.common import MOST_JOBS, default_jobs
from oci_builder.model.events import Event
from oci_builder.progress import rendering
from tests.conftest import Built, small_tiers, write_spec
from tests.lab.archives import Lab, files, write

ROOT = Path(__file__).resolve().parent.parent
START = (sys.executable, "-c", "import sys; from oci_builder.cli import main; sys.exit(main())")


def call(*words: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command; whatever it was given, it must not answer with a traceback."""
    done = subprocess.run(
        [*START, *map(str, words)], capture_output=True, cwd=cwd, timeout=300, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip
    assert b"Traceback" not in done.stderr + done.stdout, done.stderr.decode(errors="replace")
    return done


def damaged(archive: Path, target: Path) -> Path:
    """A copy with one bit of a layer turned."""
    data = bytearray(archive.read_bytes())
    data[len(data) // 3] ^= 0x10
    target.write_bytes(data)
    return target


def test_build_verify_inspect_and_unpack_end_well(quick: Built, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call("build", quick.spec, "--out", out, "--cache", tmp_path / "cache").returncode == 0
    assert call("verify", out / "runtime.oci.tar", out / "runtime.docker.tar.gz").returncode == 0
    assert call("inspect", out / "runtime.oci.tar").returncode == 0
    assert call("diff", out / "runtime.oci.tar", out / "runtime.docker.tar.gz").returncode == 0
    assert call("unpack", out / "runtime.oci.tar", tmp_path / "root").returncode == 0
    assert (tmp_path / "root/opt/rt/envs/two/lib/pkg/own.py").read_text() == "VALUE = 'two'\n"


def test_status_1_a_check_said_no(quick: Built, runnable: Built) -> None:
    """Two archives that are each valid, but not the same image; and a difference."""
    assert call("verify", quick.oci, runnable.docker).returncode == 1
    assert call("diff", quick.oci, runnable.oci).returncode == 1


def test_status_2_the_inputs_are_wrong(quick: Built, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for spec in ("broken.json", "list.json", "absent.json"):
        done = call("build", spec, "--out", tmp_path / "out", "--cache", tmp_path / "cache", cwd=tmp_path)
        assert done.returncode in (2, 5) and spec.encode() in done.stderr, (spec, done.stderr)
    assert call("build", "--no-such-option").returncode == 2
    assert call("no-such-verb").returncode == 2
    assert call("verify", quick.oci, quick.oci, quick.oci).returncode == 2


def test_status_3_bytes_are_not_what_they_claim(quick: Built, tmp_path: Path) -> None:
    for archive in (quick.oci, quick.docker):
        bad = damaged(archive, tmp_path / archive.name)
        assert call("verify", bad).returncode == 3
        assert call("unpack", bad, tmp_path / "root").returncode == 3
        assert not (tmp_path / "root").exists() or not any((tmp_path / "root").iterdir())
    (tmp_path / "text.tar").write_text("this is no archive\n" * 100)
    assert call("verify", tmp_path / "text.tar").returncode == 3


def test_status_4_refused_by_policy(quick: Built, tmp_path: Path) -> None:
    """A limit of the spec holds for what is read, too."""
    spec = write_spec(tmp_path, small_tiers(tmp_path), limits={"layers": 1})
    done = call("build", spec, "--out", tmp_path / "out", "--cache", tmp_path / "cache")
    assert (done.returncode, b"limit.layers" in done.stderr) == (4, True)
    assert call("verify", quick.oci, "--spec", spec).returncode == 4


def test_status_5_network_daemon_or_disk(quick: Built, tmp_path: Path) -> None:
    reference = "127.0.0.1:1/lab/image@sha256:" + "0" * 64
    assert call("pull", reference, tmp_path / "dest", "--cache", tmp_path / "cache").returncode == 5
    (tmp_path / "file").write_text("")
    done = call("build", quick.spec, "--out", tmp_path / "file/out", "--cache", tmp_path / "cache")
    assert done.returncode == 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_an_error(quick: Built) -> None:
    with open("/dev/full", "wb") as full:
        words = [*START, "inspect", str(quick.oci), "--json"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, cwd=ROOT)
    assert done.returncode not in (0, 1) and b"Traceback" not in done.stderr


def test_an_error_that_nobody_can_be_told_keeps_its_status() -> None:
    """Standard error on a full disk, or its reader gone: what is left is the exit status."""
    read, write = os.pipe()
    os.close(read)
    for target in (write, os.open("/dev/full", os.O_WRONLY)):
        done = subprocess.run([*START, "verify", "no-such-archive"], stdout=subprocess.PIPE, stderr=target, cwd=ROOT)
        os.close(target)
        assert done.returncode == 2


@pytest.mark.parametrize("progress", ["json", "bars", "none"])
def test_progress_that_nobody_reads_any_more_is_no_error(quick: Built, tmp_path: Path, progress: str) -> None:
    """The reader of standard error goes away, or the disk of a log is full: the work goes on, and its result is good."""
    words = [*START, "verify", str(quick.oci), "--progress", progress, "-v", "--json", str(tmp_path / "report.json")]
    read, write = os.pipe()
    os.close(read)
    for target in (write, os.open("/dev/full", os.O_WRONLY)):
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=target, cwd=ROOT)
        os.close(target)
        assert done.returncode == 0 and json.loads((tmp_path / "report.json").read_bytes())["ok"]


def test_a_machine_with_more_cpus_than_jobs_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(768)))
    assert default_jobs() == MOST_JOBS


def test_status_6_conflict(quick: Built, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    assert call("unpack", quick.oci, tmp_path).returncode == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine"]


def test_verify_json_has_the_agreed_form(quick: Built, tmp_path: Path) -> None:
    """Requirements, section 12: ``ok`` is false exactly when the exit status is not 0."""
    for archive, status in ((quick.oci, 0), (damaged(quick.oci, tmp_path / "bad.tar"), 3)):
        done = call("verify", archive, "--json", tmp_path / "report.json")
        report = json.loads((tmp_path / "report.json").read_bytes())
        assert (done.returncode, report["ok"]) == (status, status == 0)
        assert {"ok", "subjects", "findings"} <= report.keys()
        for finding in report["findings"]:
            assert {"code", "severity", "where", "expected", "actual"} <= finding.keys()
    assert any(f["severity"] == "error" for f in report["findings"])


@pytest.mark.parametrize("verb", ["build", "inspect", "diff", "unpack", "verify"])
def test_json_on_standard_output_is_nothing_but_json(quick: Built, tmp_path: Path, verb: str) -> None:
    words: dict[str, list[Any]] = {
        "build": [quick.spec, "--out", tmp_path / "out", "--cache", tmp_path / "cache", "--json"],
        "inspect": [quick.oci, "--json"],
        "diff": [quick.oci, quick.docker, "--json"],
        "unpack": [quick.oci, tmp_path / "root", "--json"],
        "verify": [quick.oci, "--json", "-"],
    }
    done = call(verb, *words[verb])
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


def test_silence_when_piped_json_lines_on_demand(quick: Built, tmp_path: Path) -> None:
    options = ("--out", tmp_path / "out", "--cache", tmp_path / "cache")
    assert call("build", quick.spec, *options).stderr == b""
    shutil.rmtree(tmp_path / "cache")
    lines = call("--progress", "json", "build", quick.spec, *options).stderr.splitlines()
    events = [json.loads(line) for line in lines]
    assert events and all("kind" in event for event in events)


def test_bars_on_a_terminal(quick: Built, tmp_path: Path) -> None:
    """Standard error is a terminal: something is drawn on it; the result stays clean."""
    ours, theirs = pty.openpty()
    words = [*START, "build", str(quick.spec), "--out", str(tmp_path / "o"), "--cache", str(tmp_path / "c"), "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=theirs, cwd=ROOT, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    drawn = os.read(ours, 1 << 16)
    os.close(ours)
    assert done.returncode == 0 and json.loads(done.stdout) and drawn


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_bar_takes_one_line_of_any_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = io.StringIO()
    with rendering("bars", stream=out) as emit:
        for task in ("layer base", "write runtime.docker.tar.gz"):
            emit(Event("start", task, total=123_456_789_012))
            emit(Event("advance", task, 123_000_000_000))
    lines = out.getvalue().splitlines()
    assert [line[:5] for line in lines] == ["layer", "write"]
    assert max(map(len, lines)) <= width


def test_untrusted_names_never_reach_the_terminal(quick: Built, tmp_path: Path) -> None:
    """Escape sequences in a file name are shown, not obeyed."""
    evil = tmp_path / "a\x1b[31mb.tar"
    evil.write_bytes(b"junk")
    done = call("verify", evil)
    assert b"\x1b" not in done.stdout + done.stderr


def test_verbose_says_where_an_error_comes_from(tmp_path: Path) -> None:
    """On demand only: for whoever looks for the cause in our code."""
    words = [*START, "-v", "build", str(tmp_path / "absent.json")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode and "spec.py" in done.stderr and "error[" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("shell", "mark"), [("bash", "complete"), ("zsh", "compdef"), ("fish", "complete")])
def test_completion_scripts(shell: str, mark: str, tmp_path: Path) -> None:
    script = call("completion", shell).stdout.decode()
    assert "_OCI_BUILDER_COMPLETE" in script and mark in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


COMPLETE = """source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _oci_builder_completion oci-builder
echo "${{COMPREPLY[*]}}" """


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("oci-builder receipt v", "verify"),
        ("oci-builder verify --pro", "--profile --progress"),
        ("oci-builder stage nccl", "nccl8 nccl8-u24"),
    ],
)
def test_a_shell_completes(tmp_path: Path, words: str, found: str) -> None:
    """bash sources the script, and its function asks the program as at a press of the tab key."""
    (tmp_path / "script").write_bytes(call("completion", "bash").stdout)
    program = tmp_path / "oci-builder"
    program.write_text(f"#!/bin/sh\nexec {shlex.join(START)} \"$@\"\n")
    program.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    asked = COMPLETE.format(script=tmp_path / "script", words=words)
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, env=env, timeout=300)
    assert (done.stdout.strip(), done.stderr) == (found, "")


@pytest.mark.parametrize("verb", sorted(cli.commands))
def test_every_verb_has_help(verb: str) -> None:
    done = call(verb, "--help")
    assert done.returncode == 0 and len(done.stdout.splitlines()) > 3


def commands(group: click.Group, name: str = "oci-builder") -> Iterator[tuple[str, click.Command]]:
    for word, command in group.commands.items():
        yield f"{name} {word}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {word}")


def test_every_option_says_what_it_does_and_its_default_in_one_way() -> None:
    options = [(name, o) for name, c in commands(cli) for o in c.params if isinstance(o, click.Option)]
    assert len(options) > 100
    assert [f"{name} {o.opts[0]}" for name, o in options if not o.help] == []
    assert [f"{name} {o.opts[0]}" for name, o in options if "default" in str(o.help)] == [], "show_default says it"


def test_no_summary_is_cut_off_on_a_terminal_of_80_columns() -> None:
    for place in ("", "cache", "key", "receipt"):
        done = call(*filter(None, [place]), "--help", COLUMNS="80")
        assert [line for line in done.stdout.decode().splitlines() if line.startswith("  ") and line.endswith("...")] == []


def test_the_verbs_of_the_contract_are_there() -> None:
    """Requirements, section 10."""
    verbs = "build verify inspect diff pull push unpack exec readiness repack publish qualification sbom receipt"
    assert set(verbs.split()) <= set(cli.commands)


def test_help_is_quick() -> None:
    """Each verb is imported only when it runs: no engine, hub or crypto library for a help text."""
    program = "import sys; from oci_builder.cli import cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    heavy = {"modal", "huggingface_hub", "docker", "oras", "cryptography", "zstandard", "isal", "requests"}
    assert heavy & set(loaded.stdout.split()) == set()


def test_the_published_schema_accepts_what_build_accepts(quick: Built, tmp_path: Path) -> None:
    import jsonschema

    schema = json.loads(call("schema").stdout)
    jsonschema.validate(json.loads(quick.spec.read_bytes()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**json.loads(quick.spec.read_bytes()), "epoch": "yesterday"}, schema)


@pytest.mark.parametrize("closing", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_take_no_files_number(quick: Built, tmp_path: Path, closing: str) -> None:
    """A closed descriptor's number goes to the next file that is opened: what is printed must not land in there."""
    line = f'"$@" {closing}'
    words = [*START, "build", quick.spec, "--out", tmp_path / "out", "--cache", tmp_path / "cache", "--json"]
    done = subprocess.run(
        ["sh", "-c", line, "sh", *map(str, words)], capture_output=True, cwd=ROOT, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    assert (tmp_path / "out/runtime.oci.tar").read_bytes() == quick.oci.read_bytes()


def test_the_groups_options_are_taken_after_the_verb(quick: Built) -> None:
    told = call("inspect", quick.oci, "--progress", "json", "-v").stderr.decode().splitlines()
    assert told and all(json.loads(line)["kind"] for line in told)
    assert b"--verbose" in call("key", "new", "--help").stdout


def test_an_empty_path_is_not_the_current_folder(quick: Built) -> None:
    """A script's unset variable: ``verify "$ARCHIVE"`` in a layout would have verified that."""
    for words in (("verify", ""), ("inspect", ""), ("unpack", quick.oci, ""), ("build", quick.spec, "--out", "")):
        done = call(*words)
        assert done.returncode == 2 and b"an empty path" in done.stderr, words


def test_a_path_is_said_once(tmp_path: Path) -> None:
    for place in ("/dev/null", str(tmp_path / "absent"), str(tmp_path)):
        done = call("verify", place)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(b"error[spec.path]"))
        assert line.count(place.encode()) == 1 and done.returncode == 2
        assert b"None" not in done.stdout


def checked(built: Built, tmp_path: Path, status: int) -> tuple[int, dict[str, Any]]:
    """``verify --exec`` with one check that ends with a status."""
    (tmp_path / "checks.json").write_text(json.dumps([{"name": "one", "argv": ["/bin/sh", "-c", f"exit {status}"]}]))
    done = call(
        "verify", built.oci, "--exec", "--checks", tmp_path / "checks.json", "--cache", tmp_path / "cache", "--json",
        tmp_path / "report.json",
    )  # fmt: skip
    return done.returncode, json.loads((tmp_path / "report.json").read_text())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_json_is_ok_exactly_when_the_status_is_0(runnable: Built, tmp_path: Path) -> None:
    """Requirements section 12, with checks that ran."""
    status, report = checked(runnable, tmp_path, 3)
    assert (status, report["ok"]) == (1, False)
    assert {"one": "fail", "container-archive": "pass"}.items() <= {c["name"]: c["outcome"] for c in report["checks"]}.items()
    assert [f["where"] for f in report["findings"] if f["severity"] == "error"] == ["container-exec", "one"]
    status, report = checked(runnable, tmp_path, 0)
    assert (status, report["ok"]) == (0, True)


def test_an_error_before_the_checks_is_in_the_json_too(quick: Built, tmp_path: Path) -> None:
    done = call("verify", quick.oci, "--exec", "--checks", tmp_path / "absent", "--json", tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert (done.returncode, report["ok"]) == (2, False)


@pytest.mark.parametrize("words", [("--checks", "c.json"), ("--receipt", "r.json"), ("--gpu=all",)])
def test_what_only_checks_use_is_refused_without_them(quick: Built, words: tuple[str, ...]) -> None:
    assert call("verify", quick.oci, *words).returncode == 2


def test_a_docker_archive_is_named_by_its_config(tmp_path: Path) -> None:
    """It has no manifest that anybody could name, and it is an image all the same."""
    members = Lab().docker()
    config = next(name for name in members if name.endswith(".json") and name != "manifest.json")
    done = call("verify", write(tmp_path / "saved.tar", members))
    assert done.returncode == 0
    assert done.stdout.decode().splitlines()[0].endswith(f"saved.tar: docker-archive, config sha256:{config[:-5]}")


@pytest.mark.parametrize(("error", "word"), [("RuntimeError(\"can't start new thread\")", "threads"), ("MemoryError", "memory")])
@pytest.mark.parametrize("verb", ["verify", "unpack"])
def test_a_machine_that_gives_no_more(tmp_path: Path, verb: str, error: str, word: str) -> None:
    """As with ``pids.max`` of a container: status 5, a line that names it, nothing left."""
    source = write(tmp_path / "a.tar", Lab([files(a=random.Random(1).randbytes(200_000))]).oci())
    prelude = f"import threading\ndef no(*_): raise {error}\nthreading._start_new_thread = no\n"
    words = [sys.executable, "-c", prelude + START[2], verb, str(source), *[str(tmp_path / "o")] * (verb == "unpack")]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert (done.returncode, word in done.stderr, "Traceback" in done.stderr) == (5, True, False), done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar"]
