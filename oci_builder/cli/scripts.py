"""What ``modal run modal_build.py`` and its like do: the stage command, started by Modal's own client."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from oci_builder.cli.common import exit_statuses
from oci_builder.model.errors import SpecError

# Of this machine only: accepted, so that the stage command says why not, and not shown.
_HERE = frozenset({"out", "cache", "scratch", "timeout", "any_gpu"})


def script_app(script: str, name: str, *stages: str) -> Any:
    """The App of a script. Called for its help, this shows it and exits: Modal's client knows of no options here.

    Args:
        script: the script's file.
        name: of the App.
        stages: those that the script runs.
    """
    if _asks_help(script, sys.argv):
        run_script(script, ["--help"], *stages)
    with exit_statuses():
        if _detaches(script, sys.argv):
            raise SpecError(
                "stage.option", "--detach: a stage ends with its client; use a terminal that stays (tmux)",
                where="--detach",
            )  # fmt: skip
        from oci_builder.engines.modal_request import load_engine

        return load_engine().script(name)


def run_script(script: str, words: Sequence[str], *stages: str) -> None:
    """Run one of the stages. All words but ``--stage NAME`` are options of ``oci-builder stage``.

    Args:
        words: after the script's name.
        stages: those that the script runs; a single one needs no ``--stage``.
    """
    try:
        with exit_statuses(verbose="-v" in words or "--verbose" in words):
            script_command(stages).main(list(words), prog_name=f"modal run {Path(script).name}")
    except SystemExit as end:
        # Modal marks an App as failed by any exception.
        if end.code not in (0, None) or "--help" in words or "-h" in words:
            raise


def script_command(stages: Sequence[str]) -> click.Command:
    """The stage command as a script has it: with ``--stage`` for its name, on Modal, without the words for here."""
    from oci_builder.cli import cli
    from oci_builder.cli.stages import stage_command

    run: Any = stage_command.callback
    # No default at all is not the same as None.
    needed: dict[str, Any] = {"default": stages[0]} if len(stages) == 1 else {"required": True}
    params: list[click.Parameter] = [
        click.Option(["--stage"], type=click.Choice(stages), help="What to run.", **needed),
        click.Option(["--on"], hidden=True, expose_value=False, callback=_refuse_engine),
    ]
    general = {option.name: option.help for option in cli.params if isinstance(option, click.Option)}
    for known in stage_command.params:
        if isinstance(known, click.Option) and known.name != "engine":
            params.append(option := copy.copy(known))
            option.hidden = option.name in _HERE
            option.help = general.get(option.name, option.help)

    def start(stage: str, **asked: Any) -> Any:
        return run(name=stage, engine="modal", **asked)

    said = f"Run a stage on Modal: {', '.join(stages)}. docs/modal.md says what runs where and what it costs."
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    return click.Command(None, settings, start, params, help=said)


def _refuse_engine(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise SpecError("stage.option", "this script runs on Modal; elsewhere it is oci-builder stage NAME --on local")


def _asks_help(script: str, argv: Sequence[str]) -> bool:
    """The client was started for the script with --help: words before the script's name are the client's own."""
    _, rest = _around(script, argv)
    return "--help" in rest or "-h" in rest


def _detaches(script: str, argv: Sequence[str]) -> bool:
    """The client was asked to leave the App running. Its App here is the script's, which holds no stage."""
    before, _ = _around(script, argv)
    # -q, -i and -m may stand before it in one word; -n, -e and -w take the rest of theirs.
    return any(word == "--detach" or re.match(r"-[qim]*d", word) for word in before)


def _around(script: str, argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words before the script's name and after it; none where it is not named."""
    names = [Path(word.partition("::")[0]).stem for word in argv]
    stem = Path(script).stem
    at = names.index(stem) if stem in names else len(names)
    return argv[1:at] if stem in names else (), argv[at + 1 :]


__all__ = ["run_script", "script_app", "script_command"]
