"""docs/modal.md says what the stages need."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from oci_builder.cli import cli
from oci_builder.cli.scripts import script_command
from oci_builder.engines.budget import Budget, cost
from oci_builder.engines.stages import STAGES
from oci_builder.engines.stages_options import parse_options
from tests.test_imports import ROOT

PAGE = (ROOT / "docs/modal.md").read_text()


def table(head: str) -> dict[str, list[str]]:
    """The table of stages whose second column has that head: first cell -> the others."""
    part = PAGE[PAGE.index(f"| stage | {head} |") :].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in line.strip("| ").split("|")] for line in part.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def test_the_table_of_stages_is_their_needs() -> None:
    written = table("image")
    assert {name: written[name] for name in STAGES} == {
        name: [
            needs.image, f"{needs.cpu:g}", str(needs.memory_mib >> 10), needs.gpu or "–", str(needs.timeout_s // 60),
            "yes" if needs.preemptible else "no", "yes" if needs.network else "blocked", ", ".join(needs.secrets) or "–",
        ]
        for name, needs in ((stage.name, stage.needs) for stage in STAGES.values())
    }  # fmt: skip


def test_the_scripts_are_there_and_run_the_stages_that_the_page_gives_them() -> None:
    said = dict(re.findall(r"^modal run (modal_\w+\.py)\s+--stage ([\w|-]+) \[OPTIONS\]$", PAGE, re.M))
    for script, stages in said.items():
        call = re.search(r"^STAGES = (.+)$", (ROOT / script).read_text(), re.M)
        assert call and re.findall(r'"([\w-]+)"', call[1]) == stages.split("|"), script
    assert {*said, "modal_repack.py"} == {path.name for path in ROOT.glob("modal_*.py")}


def test_every_code_of_modal_is_explained() -> None:
    used = {
        code
        for path in (ROOT / "oci_builder/engines").glob("modal_*.py")
        for code in re.findall(r'"(modal\.[a-z]+)"', path.read_text())
    }
    assert set(re.findall(r"`(modal\.[a-z]+)`", PAGE)) == used


def test_the_table_of_costs_is_what_the_budget_reckons() -> None:
    """A rate of one for one thing alone gives its hours."""
    rates = (Budget(cpu=1, memory=0, gpus={"B200": 0}), Budget(cpu=0, memory=1, gpus={"B200": 0}),
             Budget(cpu=0, memory=0, gpus={"B200": 1}))  # fmt: skip
    hours = {name: [cost(stage, rate).most or 0.0 for rate in rates] for name, stage in STAGES.items()}
    total = [sum(row[i] for name, row in hours.items() if name != "repack") for i in range(3)]
    wanted = {**hours, "a release, all but `repack": total}
    assert table("core hours") == {name: [f"{round(x, 2):g}" if x else "–" for x in row] for name, row in wanted.items()}


def commands() -> Iterator[list[str]]:
    """Every command of the page: lines of its blocks, and what stands in the text between backquotes."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.S | re.M)
    blocks = "\n".join(text for kind, text in fenced if not kind).replace("\\\n", " ")
    given = re.search(r'^OPTIONS="(.*)"$', blocks, re.M)
    assert given
    plain = re.sub(r"^```.*?^```$", "", PAGE, flags=re.S | re.M)
    lines = [*blocks.splitlines(), *re.findall(r"`((?:oci-builder|modal) [^`]+)`", plain)]
    for line in lines:
        for part in re.split(r"&&|\|\||;", line.replace("$OPTIONS", given[1]).replace("[OPTIONS]", "")):
            words = shlex.split(part.replace("…", "x"), comments=True)
            words = words[words.index("do") + 1 :] if "do" in words else words
            words = [w for w in words if not re.match(r"[A-Z_]+=", w) or "secret" in words]
            if words and words[0] in ("modal", "oci-builder"):
                yield words


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_of_the_page_is_one_that_there_is(words: list[str]) -> None:
    """Parsed by the command itself, ours or Modal's client's; nothing is run."""
    if words[0] == "oci-builder":
        parsed(cli, [w.replace("NAME", "build").replace("local|modal", "modal") for w in words[1:]])
        return
    if words[1] != "run":
        pytest.importorskip("modal", reason="needs the extra 'modal'")
        from modal.cli.entry_point import entrypoint_cli

        parsed(entrypoint_cli, words[1:])
        return
    if words[2:3] in ([], ["SCRIPT"]):
        return
    stages = re.findall(r'"([\w-]+)"', (re.search(r"^STAGES = (.+)$", (ROOT / words[2]).read_text(), re.M) or [""])[0])
    told = [w for w in words[3:] if w != "--stage"]
    for name in told[0].split("|") if "--stage" in words and "$" not in told[0] else stages:
        rest = told[1:] if "--stage" in words else told
        with script_command(stages).make_context("x", ["--stage", name, *rest]) as context:
            assert parse_options(STAGES[name], context.params["given"]) is not None


def parsed(command: click.Command, words: list[str]) -> None:
    """Follow the words down to the command that they name; it takes the rest."""
    rest = list(words)
    while isinstance(command, click.Group) and rest:
        with click.Context(command) as context:
            found = command.get_command(context, rest.pop(0))
        assert found is not None, words
        command = found
    if rest or words[-1] != command.name:  # else the text speaks of the command
        command.make_context("x", rest).close()


def test_the_page_has_commands() -> None:
    found = [words[:2] for words in commands()]
    assert len(found) > 10
    assert {tuple(w) for w in found} >= {("modal", "run"), ("modal", "secret"), ("modal", "token"), ("oci-builder", "key")}
    assert Path(ROOT / "layers/files/ensure_runtime.sh").is_file(), "the page names it"
