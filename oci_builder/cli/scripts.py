"""What ``modal run modal_build.py`` and its like do: the stage command, started by Modal's own client."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from oci_builder.cli.common import Settings, exit_statuses, json_bytes
from oci_builder.model.errors import SpecError
from oci_builder.release.files import require_file_place

# Of this machine only: accepted, so that the stage command says why not, and not shown.
_HERE = frozenset({"out", "cache", "scratch", "timeout", "any_gpu"})
# The words of ``modal run`` before the script's name; of its App's own flags only those that matter here are looked at.
_CLIENT = click.Command(
    None,
    {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
    params=[
        click.Option(["-n", "--name"]), click.Option(["-e", "--env"]), click.Option(["-w", "--write-result"]),
        click.Option(["-q", "--quiet"], is_flag=True), click.Option(["-d", "--detach"], is_flag=True),
        click.Option(["-i", "--interactive"], is_flag=True), click.Option(["-m"], is_flag=True),
        click.Option(["--timestamps"], is_flag=True),
    ],
    add_help_option=False,
)  # fmt: skip


def script_app(script: str, name: str, *stages: str) -> Any:
    """The App of a script. Called for its help, this shows it and exits: Modal's client knows of no options here.

    Args:
        script: the script's file.
        name: of the App.
        stages: those that the script runs.
    """
    client, rest = _around(script, sys.argv)
    if "--help" in rest or "-h" in rest:
        run_script(script, ["--help"], *stages)
    with exit_statuses():
        if client.get("detach"):
            raise SpecError(
                "stage.option", "--detach: a stage ends with its client; use a terminal that stays (tmux)",
                where="--detach",
            )  # fmt: skip
        if client.get("write_result"):
            # The client opens it last, when the stage is paid for.
            require_file_place(Path(client["write_result"]))
        from oci_builder.engines.modal_client import load_engine

        return load_engine().script(name)


def run_script(script: str, words: Sequence[str], *stages: str) -> bytes:
    """Run one of the stages. All words but ``--stage NAME`` are options of ``oci-builder stage``.

    Args:
        words: after the script's name.
        stages: those that the script runs; a single one needs no ``--stage``.

    Returns: the stage's answer, as ``--json`` prints it: ``modal run --write-result FILE`` writes it there.
    """
    settings = Settings()
    try:
        with exit_statuses(verbose="-v" in words or "--verbose" in words):
            script_command(stages).main(list(words), prog_name=f"modal run {Path(script).name}", obj=settings)
    except SystemExit as end:
        # Modal marks an App as failed by any exception.
        if end.code not in (0, None) or "--help" in words or "-h" in words:
            raise
    return json_bytes(settings.answer)


def script_command(stages: Sequence[str]) -> click.Command:
    """The stage command as a script has it: with ``--stage`` for its name, on Modal, without the words for here."""
    from oci_builder.cli.stages import stage_command

    run: Any = stage_command.callback
    # No default at all is not the same as None.
    needed: dict[str, Any] = {"default": stages[0]} if len(stages) == 1 else {"required": True}
    params: list[click.Parameter] = [
        click.Option(["--stage"], type=click.Choice(stages), help="What to run.", **needed),
        click.Option(["--on"], hidden=True, expose_value=False, callback=_refuse_engine),
    ]
    for known in stage_command.params:
        if isinstance(known, click.Option) and known.name != "engine":
            params.append(option := copy.copy(known))
            option.hidden = option.name in _HERE

    def start(stage: str, **asked: Any) -> Any:
        return run(name=stage, engine="modal", **asked)

    said = f"Run a stage on Modal: {', '.join(stages)}. docs/modal.md says what runs where and what it costs."
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    return click.Command(None, settings, start, params, help=said)


def _refuse_engine(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise SpecError("stage.option", "this script runs on Modal; elsewhere it is oci-builder stage NAME --on local")


def _around(script: str, argv: Sequence[str]) -> tuple[Mapping[str, Any], Sequence[str]]:
    """The client's own options before the script's name, and the words after it; none where it is not named."""
    found: dict[str, Any] = {}
    words, stem = list(argv[1:]), Path(script).stem
    while words:
        context = _CLIENT.make_context("run", words, resilient_parsing=True)
        found |= {name: value for name, value in context.params.items() if value}
        named, *words = context.args or [""]
        if Path(named.partition("::")[0]).stem == stem:
            return found, words
    return {}, ()


__all__ = ["run_script", "script_app", "script_command"]
