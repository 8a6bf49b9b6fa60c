"""The scripts for ``modal run``: their words and their help, with the real client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

pytest.importorskip("modal", reason="needs the extra 'modal'")

from oci_builder.cli import stages as stage_words
from oci_builder.cli.common import Settings, pass_settings
from oci_builder.cli.scripts import _around, run_script, script_app, script_command
from oci_builder.model.errors import SpecError
from tests.engines.test_modal_clients import with_client
from tests.lab.modal_plane_client import ROOT, Ran, RunningPlane

SCRIPTS = {
    "modal_build.py": "build package container container-check qualification publish",
    "modal_qualify.py": "single nccl8 nccl8-u24",
    "modal_repack.py": "repack",
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the stage command was called with; it does nothing."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(stage_words.stage_command, "callback", lambda **values: found.append(values))
    return found


@pytest.mark.parametrize(
    ("words", "stage"),
    [
        (["--stage", "package", "--yes"], "package"),
        (["--yes", "--stage=build"], "build"),
        (["--key", "k", "--stage", "build", "-o", "jobs=2"], "build"),
    ],
)
def test_words_of_a_script_are_those_of_the_stage_command(words: list[str], stage: str, asked: list[dict[str, Any]]) -> None:
    done = CliRunner().invoke(script_command(("build", "package")), words)
    assert done.exit_code == 0, done.output
    (values,) = asked
    assert (values["name"], values["engine"], values["yes"]) == (stage, "modal", "--yes" in words)
    assert (values["key"], values["given"]) == ((Path("k"), ("jobs=2",)) if "-o" in words else (None, ()))


@pytest.mark.parametrize("words", [[], ["--stage"], ["--stage", "nccl8"], ["--stage="], ["build"], ["--stage", "build", "x"]])
def test_a_script_runs_its_own_stages_only(words: list[str], asked: list[dict[str, Any]]) -> None:
    done = CliRunner().invoke(script_command(("build", "package")), words)
    assert (done.exit_code, asked) == (2, []), done.output


@pytest.mark.parametrize("words", [["--on", "local", "--stage", "build"], ["--stage", "build", "--on=modal"]])
def test_a_script_runs_on_modal_only(words: list[str], asked: list[dict[str, Any]]) -> None:
    done = CliRunner().invoke(script_command(("build", "package")), words)
    assert isinstance(done.exception, SpecError) and done.exception.code == "stage.option"
    assert asked == []


def test_a_script_of_one_stage_needs_no_name(asked: list[dict[str, Any]]) -> None:
    assert CliRunner().invoke(script_command(("repack",)), ["--yes"]).exit_code == 0
    assert asked[0]["name"] == "repack"


def test_the_stage_command_keeps_its_own_help() -> None:
    """The script's options are copies."""
    script_command(("build",))
    with click.Context(stage_words.stage_command) as context:
        assert "--out PATH" in stage_words.stage_command.get_help(context)


@pytest.fixture(scope="module", params=["modal==1.6.0", "installed"], ids=["oldest", "installed"])
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, RunningPlane]]:
    folder = tmp_path_factory.mktemp("modal")
    python = sys.executable if request.param == "installed" else str(with_client(folder / "client", request.param))
    running = RunningPlane(folder / "plane", Path(python))
    try:
        yield python, running
    finally:
        running.stop()


def started(plane: tuple[str, RunningPlane], *words: str) -> Ran:
    python, running = plane
    return running.run("run", *words, python=python)


def shown(ran: Ran, script: str) -> Sequence[str]:
    lines = ran.out.splitlines()
    assert ran.status == 0 and f"Usage: modal run {script} [OPTIONS]" in lines, ran.text
    return lines


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_the_stages_and_options_and_makes_no_app(plane: tuple[str, RunningPlane], script: str) -> None:
    """The client's own help of a script that takes any words shows none of them."""
    before = plane[1].mark
    lines = shown(started(plane, script, "--help"), script)
    assert any(f"--stage [{SCRIPTS[script].replace(' ', '|')}]" in line for line in lines)
    words = {line.split()[-2].rstrip(",") if line.startswith("  -") and line.endswith("PATH") else "" for line in lines}
    assert not words & {"--out", "--cache"}, "of this machine only"
    assert plane[1].mark == before


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("words", [["--", "--help"], ["-h"], ["--stage", "build", "--help"]], ids=" ".join)
def test_help_wherever_it_stands(plane: tuple[str, RunningPlane], words: list[str]) -> None:
    shown(started(plane, "modal_build.py", *words), "modal_build.py")


@pytest.mark.network
@pytest.mark.slow
def test_a_wrong_word_is_told_with_the_script_s_usage(plane: tuple[str, RunningPlane]) -> None:
    ran = started(plane, "modal_build.py", "--stage", "build", "--bogus")
    assert (ran.status, "Try 'modal run modal_build.py --help'" in ran.err) == (2, True), ran.text


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("word", ["--detach", "-qd"])
def test_a_stage_cannot_be_left_behind(plane: tuple[str, RunningPlane], word: str) -> None:
    """The client would say that it goes on without it: that is the script's App, and the stage has its own."""
    before = plane[1].mark
    ran = started(plane, word, "-e", "dev", "modal_build.py", "--stage", "build", "--yes")
    assert (ran.status, ran.err.count("error[stage.option]: --detach")) == (2, 1), ran.text
    assert plane[1].events("container", before) == []


def test_a_script_is_no_program_of_its_own() -> None:
    """Imported by anything else, even by a program that was asked for help, it makes its App and nothing more."""
    code = "import sys; sys.argv = ['other', '--help']; import modal_build; print(modal_build.app.name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "oci-builder-build"), done.stderr


@pytest.mark.parametrize(
    ("words", "client", "rest"),
    [
        (["run", "modal_build.py", "--stage", "build"], {}, ["--stage", "build"]),
        (["run", "-qd", "-e", "dev", "x/modal_build.py::main", "-w", "y"], {"quiet", "detach", "env"}, ["-w", "y"]),
        (["run", "-n", "modal_build", "-d", "modal_build.py"], {"name", "detach"}, []),
        (["run", "-wout.json", "-m", "modal_build"], {"write_result", "m"}, []),
        (["run", "--write-result=a", "--new-flag", "modal_build.py"], {"write_result"}, []),
        (["run", "-w"], {}, []),
        (["-d", "other.py"], {}, []),
    ],
)
def test_the_client_s_words_are_told_from_the_script_s(words: list[str], client: set[str], rest: list[str]) -> None:
    found, after = _around("/p/modal_build.py", ["modal", *words])
    assert (set(found), list(after)) == (set(client), rest)


@pytest.mark.parametrize("place", ["gone/x.json", "."])
def test_an_answer_s_place_is_looked_at_before_anything_is_paid_for(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client opens the file of ``-w`` last of all."""
    monkeypatch.setattr(sys, "argv", ["modal", "run", "-w", str(tmp_path / place), "modal_build.py"])
    with pytest.raises(SystemExit) as ended:
        script_app("modal_build.py", "x", "build")
    assert ended.value.code == 2


def test_the_answer_of_a_script_is_that_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``modal run -w FILE`` writes; bytes, for a name need not be text."""
    answer = {"outcome": "pass", "exit": 0, "notes": ["\udcff ü"]}

    @pass_settings
    def run(settings: Settings, /, **values: Any) -> None:
        settings.answer = answer
        sys.exit(0)

    monkeypatch.setattr(stage_words.stage_command, "callback", run)
    written = run_script("modal_build.py", ["--stage", "build"], "build")
    assert written.decode() == '{\n  "exit": 0,\n  "notes": [\n    "\\udcff ü"\n  ],\n  "outcome": "pass"\n}\n'
